//! Kernels of etude: encode the difference of two snapshots of weights, and apply it, at memory speed; and products of
//! few rows, with what a decoded token needs beside them.
//!
//! `docs/formats/delta.md` defines the format; the numpy kernels in `etude.weights` produce the same bytes, more
//! slowly. Bytes to decode are untrusted: they are decoded or refused, with memory in proportion to the tile. The
//! caller's description of its own memory is trusted. Std only; the C ABI is in `abi`.

pub mod abi;
pub mod bits;
pub mod checksum;
pub mod decode;
pub mod encode;
pub mod fused;
pub mod kind;
pub mod level;
pub mod product;
pub mod scan;
pub mod scatter;
pub mod threads;
pub mod tile;
pub mod vector;
