//! Delta kernels of etude: two snapshots of weights to the bytes between them, and back, at memory speed.
//!
//! `docs/formats/delta.md` is the format; the numpy path in `etude.weights` gives the same bytes, slowly. Bytes to
//! decode may be anything: they are refused or understood, with memory in proportion to the tile. What is trusted is
//! the caller's description of its own memory. Std only; the C ABI is in `abi`.

pub mod abi;
pub mod bits;
pub mod checksum;
pub mod decode;
pub mod encode;
pub mod kind;
pub mod level;
pub mod scan;
pub mod scatter;
pub mod threads;
pub mod tile;
