//! The C ABI. A caller must describe its memory truthfully: addresses, sizes, and tiles that refer to existing pieces.
//! Everything else is checked. No panic crosses the boundary.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::bits::Refused;
use crate::checksum::{self, ChecksumRequest, Part};
use crate::decode::{Decoder, Found, InPlace, Listed, num_changes};
use crate::encode::Encoder;
use crate::fused::{self, RawAttention, RawExperts, RawNorm};
use crate::kind::{Code, Kind, MAX_CLASSES};
use crate::level;
use crate::product::{self, RawProduct};
use crate::scan::{Classes, Level};
use crate::scatter::{self, RawScatter};
use crate::threads;
use crate::tile::{MAX_ELEMENTS, Piece, num_elements};

/// Must be raised whenever a signature or a structure in this file changes.
pub const ABI_VERSION: u32 = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawKind {
    pub bits: u32,
    pub shift: u32,
    pub exponent_mask: u32,
    /// Bytes of a code in memory: 1, 2 or 4.
    pub width: u32,
}

/// Rows of codes. `stride` counts elements. In a list of changes, the first code has the position `first`, and each row
/// starts `step` positions after the one before.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawPiece {
    pub old: *const c_void,
    pub new: *mut c_void,
    pub rows: u64,
    pub cols: u64,
    pub stride: u64,
    pub first: u64,
    pub step: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawTile {
    pub first_piece: u64,
    pub num_pieces: u32,
    pub high: u8,
    pub classes: u8,
    pub unused: u16,
}

/// The arguments of a call: the pieces and tiles, the dtype, the maximum number of threads, and the instruction level.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Request {
    pub kind: RawKind,
    pub level: u32,
    pub threads: u32,
    pub pieces: *const RawPiece,
    pub num_pieces: u64,
    pub tiles: *const RawTile,
    pub num_tiles: u64,
}

/// The bytes of one tile.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawPayload {
    pub start: *const u8,
    pub num_bytes: u64,
}

/// The first tile that was refused, and the reason: ASCII, ending with a zero byte.
#[repr(C)]
pub struct Refusal {
    pub tile: u64,
    pub why: [u8; 64],
}

pub struct EncodedTiles(Vec<Vec<u8>>);

/// A request whose numbers were checked.
struct Checked<T> {
    level: Level,
    threads: usize,
    tiles: Vec<(Classes, Vec<Piece<T>>)>,
}

unsafe impl<T> Sync for Checked<T> {}

const BAD_REQUEST: Refused = "the request is invalid";
const FAILED: Refused = "the decoder failed";

/// Success, or the first tile that was refused and the reason.
type Outcome = Result<(), (u64, Refused)>;

unsafe fn checked<T: Code>(request: &Request) -> Result<Checked<T>, Refused> {
    let RawKind { bits, shift, exponent_mask, width } = request.kind;
    let kind = Kind::new(bits, shift, exponent_mask).ok_or(BAD_REQUEST)?;
    let level = Level::of(request.level).ok_or(BAD_REQUEST)?;
    if bits > 8 * width {
        return Err(BAD_REQUEST);
    }
    let pieces = unsafe { slice(request.pieces, request.num_pieces) };
    let tiles = unsafe { slice(request.tiles, request.num_tiles) };
    let mut all = Vec::with_capacity(tiles.len());
    for tile in tiles {
        let first = tile.first_piece as usize;
        let some = first.checked_add(tile.num_pieces as usize).and_then(|end| pieces.get(first..end));
        let some: Vec<Piece<T>> = some.ok_or(BAD_REQUEST)?.iter().map(piece).collect();
        let sizes = some.iter().all(|p| p.rows <= MAX_ELEMENTS as usize && p.cols <= MAX_ELEMENTS as usize);
        let classes = tile.classes;
        if !sizes || num_elements(&some) > MAX_ELEMENTS || classes == 0 || classes as usize > MAX_CLASSES {
            return Err(BAD_REQUEST);
        }
        all.push((Classes { kind, high: tile.high, count: classes }, some));
    }
    Ok(Checked { level, threads: request.threads as usize, tiles: all })
}

fn piece<T>(raw: &RawPiece) -> Piece<T> {
    Piece {
        old: raw.old.cast(),
        new: raw.new.cast(),
        rows: raw.rows as usize,
        cols: raw.cols as usize,
        stride: raw.stride as usize,
        first: raw.first as usize,
        step: raw.step as usize,
    }
}

/// A slice of `count` items. An empty one may have any address.
unsafe fn slice<'a, T>(at: *const T, count: u64) -> &'a [T] {
    if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(at, count as usize) } }
}

macro_rules! by_width {
    ($width:expr, $body:ident $arguments:tt, else $other:expr) => {
        match $width {
            1 => $body::<u8>$arguments,
            2 => $body::<u16>$arguments,
            4 => $body::<u32>$arguments,
            _ => $other,
        }
    };
}

fn shielded<R>(otherwise: R, work: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

#[unsafe(no_mangle)]
pub extern "C" fn etude_abi_version() -> u32 {
    ABI_VERSION
}

/// The best instruction level of this machine: 0 portable, 1 AVX2, 2 AVX-512.
#[unsafe(no_mangle)]
pub extern "C" fn etude_best_level() -> u32 {
    Level::best() as u32
}

/// Encode every tile. Writes the size of each tile to `num_bytes`. The result must be passed to `etude_encoded_take`.
/// Returns null for an invalid request.
///
/// # Safety
/// The request describes readable memory, `old` and `new`; `num_bytes` has one entry per tile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_encode(request: *const Request, num_bytes: *mut u64) -> *mut EncodedTiles {
    unsafe fn run<T: Code>(request: &Request) -> Option<Vec<Vec<u8>>> {
        let checked = unsafe { checked::<T>(request) }.ok()?;
        Some(threads::over(checked.threads, checked.tiles.len(), Encoder::default, |encoder, i| {
            let checked = &checked;
            let (classes, pieces) = &checked.tiles[i];
            unsafe { level::encode(checked.level, encoder, *classes, pieces) }
        }))
    }
    shielded(std::ptr::null_mut(), || unsafe {
        let request = &*request;
        let Some(tiles) = by_width!(request.kind.width, run(request), else None) else {
            return std::ptr::null_mut();
        };
        for (i, tile) in tiles.iter().enumerate() {
            *num_bytes.add(i) = tile.len() as u64;
        }
        Box::into_raw(Box::new(EncodedTiles(tiles)))
    })
}

/// Copy the encoded tiles to `out`, one after another, and free them.
///
/// # Safety
/// `tiles` comes from `etude_encode` and was not taken before; `out` has room for the sum of the sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_encoded_take(tiles: *mut EncodedTiles, mut out: *mut u8) {
    let EncodedTiles(tiles) = *unsafe { Box::from_raw(tiles) };
    for tile in tiles {
        out = unsafe { copy_to(&tile, out) };
    }
}

/// Write the number of codes that each tile changes, according to its bytes, to `counts`: `etude_list` lists that many.
/// Returns 0 on success; 1 if a tile was refused, as described in `refusal`.
///
/// # Safety
/// The request's `old` memory and the payloads are readable; there is one payload and one count per tile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_count(
    request: *const Request,
    payloads: *const RawPayload,
    counts: *mut u64,
    refusal: *mut Refusal,
) -> u32 {
    unsafe fn run<T: Code>(request: &Request, payloads: *const RawPayload, counts: *mut u64) -> Outcome {
        let checked = unsafe { checked::<T>(request) }.map_err(|why| (0, why))?;
        let payloads = Payloads(unsafe { slice(payloads, request.num_tiles) });
        for (i, (classes, pieces)) in checked.tiles.iter().enumerate() {
            let count = unsafe { num_changes(*classes, pieces, payloads.bytes(i)) }.map_err(|why| (i as u64, why))?;
            unsafe { *counts.add(i) = count as u64 };
        }
        Ok(())
    }
    let outcome = shielded(Err((0, FAILED)), || unsafe {
        let request = &*request;
        by_width!(request.kind.width, run(request, payloads, counts), else Err((0, BAD_REQUEST)))
    });
    unsafe { status(outcome, refusal) }
}

/// Output of `etude_list`: the lists of all tiles, one after another.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawLists {
    /// Number of changes of each tile, from `etude_count`.
    pub counts: *const u64,
    /// Room for the sum of `counts`: positions, and codes of the width of the request.
    pub places: *mut u32,
    pub codes: *mut c_void,
    /// The result for each piece of the request; must be zeroed.
    pub found: *mut Found,
    /// 1: also compute what each piece adds to the checksum of its tensor; then `first` and `step` of a piece are
    /// relative to its tensor.
    pub summed: u64,
}

unsafe impl Sync for RawLists {}

/// Decode every tile to lists: for each piece the positions that change, ascending, and the new codes there. Returns 0
/// on success; 1 if a tile was refused, as described in `refusal`: then the lists are undefined.
///
/// # Safety
/// The request's `old` memory and the payloads (one per tile) are readable; the lists have the stated room; no two
/// tiles share a piece.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_list(
    request: *const Request,
    payloads: *const RawPayload,
    lists: *const RawLists,
    refusal: *mut Refusal,
) -> u32 {
    unsafe fn run<T: Code + Part>(request: &Request, payloads: *const RawPayload, lists: &RawLists) -> Outcome {
        let checked = unsafe { checked::<T>(request) }.map_err(|why| (0, why))?;
        let payloads = Payloads(unsafe { slice(payloads, request.num_tiles) });
        let (tiles, counts) =
            unsafe { (slice(request.tiles, request.num_tiles), slice(lists.counts, request.num_tiles)) };
        let starts: Vec<usize> = std::iter::once(&0)
            .chain(counts)
            .scan(0, |start, &count| {
                *start += count as usize;
                Some(*start)
            })
            .collect();
        let done = threads::over(checked.threads, tiles.len(), Decoder::default, |decoder, i| {
            let (checked, payloads, lists) = (&checked, &payloads, &*lists);
            let (classes, pieces) = &checked.tiles[i];
            let (places, codes) =
                (lists.places.wrapping_add(starts[i]), lists.codes.cast::<T>().wrapping_add(starts[i]));
            let (bytes, room) = (unsafe { payloads.bytes(i) }, counts[i] as usize);
            let found = unsafe { of_tile(lists.found, &tiles[i]) };
            let outcome = unsafe {
                if lists.summed == 1 {
                    let mut sink = Listed::<T, true>::new(places, codes, room, found);
                    level::decode(checked.level, decoder, *classes, pieces, bytes, &mut sink)
                } else {
                    let mut sink = Listed::<T, false>::new(places, codes, room, found);
                    level::decode(checked.level, decoder, *classes, pieces, bytes, &mut sink)
                }
            };
            outcome.map_err(|why| (i as u64, why))
        });
        done.into_iter().collect()
    }
    let outcome = shielded(Err((0, FAILED)), || unsafe {
        let (request, lists) = (&*request, &*lists);
        by_width!(request.kind.width, run(request, payloads, lists), else Err((0, BAD_REQUEST)))
    });
    unsafe { status(outcome, refusal) }
}

/// Decode every tile into the `new` memory of the pieces, which may be the old one. Returns 0 on success; 1 if a tile
/// was refused, as described in `refusal`: then `new` is partly written.
///
/// # Safety
/// The request's `old` memory is readable, and its `new` memory is writable and contains the old codes; no two pieces
/// overlap; the payloads (one per tile) are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_apply(
    request: *const Request,
    payloads: *const RawPayload,
    refusal: *mut Refusal,
) -> u32 {
    unsafe fn run<T: Code>(request: &Request, payloads: *const RawPayload) -> Outcome {
        let checked = unsafe { checked::<T>(request) }.map_err(|why| (0, why))?;
        let payloads = Payloads(unsafe { slice(payloads, request.num_tiles) });
        let done = threads::over(checked.threads, checked.tiles.len(), Decoder::default, |decoder, i| {
            let (checked, payloads) = (&checked, &payloads);
            let (classes, pieces) = &checked.tiles[i];
            let bytes = unsafe { payloads.bytes(i) };
            let mut sink = InPlace::default();
            unsafe { level::decode(checked.level, decoder, *classes, pieces, bytes, &mut sink) }
                .map_err(|why| (i as u64, why))
        });
        done.into_iter().collect()
    }
    let outcome = shielded(Err((0, FAILED)), || unsafe {
        let request = &*request;
        by_width!(request.kind.width, run(request, payloads), else Err((0, BAD_REQUEST)))
    });
    unsafe { status(outcome, refusal) }
}

/// Count elements, and changed elements, by the exponent of the old code, in every `stride`-th block of 64; a last,
/// shorter block counts only if the stride is 1. Returns 1 for invalid arguments.
///
/// # Safety
/// `old` and `new` have `count` codes; the two tables have 256 entries, to which the counts are added.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_sample(
    kind: *const RawKind,
    old: *const c_void,
    new: *const c_void,
    count: u64,
    stride: u64,
    elements: *mut i64,
    changed: *mut i64,
) -> u32 {
    unsafe fn run<T: Code>(
        kind: Kind,
        old: *const c_void,
        new: *const c_void,
        count: u64,
        stride: u64,
    ) -> [[i64; 256]; 2] {
        let (old, new) = unsafe { (slice::<T>(old.cast(), count), slice::<T>(new.cast(), count)) };
        let whole = if stride > 1 { old.len() / 64 * 64 } else { old.len() };
        // neighbours mostly share an exponent: two tables, so that consecutive counts do not depend on each other
        let mut tables = [[[0u32; 256]; 2]; 2];
        let ahead = 64 * 16 * stride as usize;
        // by number: to step through pairs of chunks is to go through all of them
        for from in (0..whole).step_by((64 * stride).min(isize::MAX as u64) as usize) {
            let upto = whole.min(from + 64);
            let (a, b) = (&old[from..upto], &new[from..upto]);
            fetch(a.as_ptr().wrapping_add(ahead), a.len());
            fetch(b.as_ptr().wrapping_add(ahead), b.len());
            for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
                let exponent = (kind.exponent(a.widen()) & 255) as usize;
                tables[i & 1][0][exponent] += 1;
                tables[i & 1][1][exponent] += (a != b) as u32;
            }
        }
        std::array::from_fn(|t| std::array::from_fn(|e| tables[0][t][e] as i64 + tables[1][t][e] as i64))
    }
    let RawKind { bits, shift, exponent_mask, width } = unsafe { *kind };
    let (Some(kind), 1..) = (Kind::new(bits, shift, exponent_mask), stride) else { return 1 };
    let tables = unsafe { by_width!(width, run(kind, old, new, count, stride), else return 1) };
    for (table, out) in tables.iter().zip([elements, changed]) {
        for (i, number) in table.iter().enumerate() {
            unsafe { *out.add(i) += number };
        }
    }
    0
}

/// Count the codes that differ: the plain scan of both snapshots that benchmarks compare encoding with.
///
/// # Safety
/// `old` and `new` have `count` codes of `width` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_count_changed(old: *const c_void, new: *const c_void, count: u64, width: u32) -> u64 {
    unsafe fn run<T: Code>(old: *const c_void, new: *const c_void, count: u64) -> u64 {
        unsafe { level::count_changed(Level::best(), slice::<T>(old.cast(), count), slice::<T>(new.cast(), count)) }
    }
    unsafe { by_width!(width, run(old, new, count), else 0) }
}

/// Write codes to positions of live memory, with at most `threads` threads. Returns 0 on success; 1 if a position is
/// out of range or a width is invalid.
///
/// # Safety
/// As `scatter::scatter`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_scatter(rows: *const RawScatter, num_rows: u64, threads: u32) -> u32 {
    shielded(1, || unsafe { !scatter::scatter(slice(rows, num_rows), threads as usize) as u32 })
}

/// Compute the checksum sums of codes before (the first two of `sums`) and after a change. Returns 0 on success; 1 for
/// invalid arguments.
///
/// # Safety
/// As `checksum::summed`; `sums` has four entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_checksum(request: *const ChecksumRequest, sums: *mut u64) -> u32 {
    let found = shielded(Err("the checksum failed"), || unsafe { checksum::summed(&*request) });
    let Ok(found) = found else { return 1 };
    for (i, &sum) in found.old.iter().chain(&found.new).enumerate() {
        unsafe { *sums.add(i) = sum };
    }
    0
}

/// Multiply few rows by the weights of their groups. Returns 0 on success; 1, with nothing written, where the machine or
/// the sizes do not allow it.
///
/// # Safety
/// As `product::products`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_products(request: *const RawProduct) -> u32 {
    shielded(1, || unsafe { !product::products(&*request) as u32 })
}

/// Compute the experts of a layer. Returns 0 on success; 1, with nothing written, where the machine or the sizes do not
/// allow it.
///
/// # Safety
/// As `fused::experts`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_experts(request: *const RawExperts) -> u32 {
    shielded(1, || unsafe { !fused::experts(&*request) as u32 })
}

/// Compute attention of decoded tokens. Returns 0 on success; 1, with nothing written, where the machine or the sizes do
/// not allow it.
///
/// # Safety
/// As `fused::attention`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_attention(request: *const RawAttention) -> u32 {
    shielded(1, || unsafe { !fused::attention(&*request) as u32 })
}

/// Compute RMSNorm. Returns 0 on success; 1, with nothing written, where the machine or the width do not allow it.
///
/// # Safety
/// As `fused::norm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etude_norm(request: *const RawNorm) -> u32 {
    shielded(1, || unsafe { !fused::norm(&*request) as u32 })
}

/// Prefetch codes. Any address is allowed.
fn fetch<T>(codes: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..count * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        unsafe { _mm_prefetch::<_MM_HINT_T0>(codes.cast::<i8>().wrapping_add(at)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (codes, count);
}

struct Payloads<'a>(&'a [RawPayload]);

unsafe impl Sync for Payloads<'_> {}

impl Payloads<'_> {
    unsafe fn bytes(&self, i: usize) -> &[u8] {
        unsafe { slice(self.0[i].start, self.0[i].num_bytes) }
    }
}

/// Copy a slice. Returns the address after the copy.
unsafe fn copy_to<T: Copy>(from: &[T], to: *mut T) -> *mut T {
    unsafe {
        std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
        to.add(from.len())
    }
}

unsafe fn refuse(refusal: *mut Refusal, (tile, why): (u64, Refused)) {
    let mut text = [0; 64];
    let count = why.len().min(63);
    text[..count].copy_from_slice(&why.as_bytes()[..count]);
    unsafe { *refusal = Refusal { tile, why: text } };
}

/// Convert an outcome to a return code: 0, or 1 with the reason in `refusal`.
unsafe fn status(outcome: Outcome, refusal: *mut Refusal) -> u32 {
    let Err(why) = outcome else { return 0 };
    unsafe { refuse(refusal, why) };
    1
}

/// The results of a tile's pieces.
unsafe fn of_tile<'a>(found: *mut Found, tile: &RawTile) -> &'a mut [Found] {
    if tile.num_pieces == 0 {
        return &mut [];
    }
    unsafe { std::slice::from_raw_parts_mut(found.add(tile.first_piece as usize), tile.num_pieces as usize) }
}
