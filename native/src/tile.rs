//! A tile: the codes that it covers, and the parts of its encoding that encoder and decoder share.

use crate::bits::{BitWriter, Bytes, CAP, End, LowBits, Plane, Refused, Unary};
use crate::checksum::BLOCK_BYTES;
use crate::kind::Code;
use crate::scan::{BLOCK, CHUNK, Classes, Scan};

/// Maximum number of elements of a tile.
pub const MAX_ELEMENTS: u64 = 1 << 23;
/// The first byte of a coded tile, and of a raw tile (which contains the new codes unchanged).
pub const CODED: u8 = 1;
pub const RAW: u8 = 2;
pub const INVERTED: u8 = 1 << 5;

/// Rows of codes. `old` is read. `new` is read by the encoder and written by `apply`, where both may be the same
/// memory.
#[derive(Clone, Copy)]
pub struct Piece<T> {
    pub old: *const T,
    pub new: *mut T,
    pub rows: usize,
    pub cols: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Position of the first code in a list of changes, and distance of one row from the next there.
    pub first: usize,
    pub step: usize,
}

/// Consecutive codes of a tile: `count` of them, the first at `position` in the tile and at position `first` in a list
/// of changes.
#[derive(Clone, Copy)]
pub struct Run<T> {
    pub old: *const T,
    pub new: *mut T,
    pub count: usize,
    pub position: usize,
    pub first: usize,
    /// Number of its piece.
    pub piece: usize,
}

impl<T> Run<T> {
    /// The run without its first `count` codes.
    fn after(self, count: usize) -> Self {
        Self {
            old: self.old.wrapping_add(count),
            new: self.new.wrapping_add(count),
            count: self.count - count,
            position: self.position + count,
            first: self.first + count,
            piece: self.piece,
        }
    }
}

/// Some blocks of a run, or its last, partial block.
pub struct Span<T> {
    pub old: *const T,
    pub new: *mut T,
    pub blocks: usize,
    pub position: usize,
    /// Number of elements of the last block; 0 if it is full.
    pub rest: usize,
}

impl<T: Code> Span<T> {
    /// The old and the new code at a position of the span.
    ///
    /// # Safety
    /// Both are readable.
    #[inline(always)]
    pub unsafe fn codes_at(&self, place: u16) -> (T, T) {
        let at = place as usize;
        unsafe { (*self.old.add(at), *self.new.add(at)) }
    }
}

pub fn num_elements<T>(pieces: &[Piece<T>]) -> u64 {
    pieces.iter().map(|p| p.rows as u64 * p.cols as u64).sum()
}

/// The runs of a tile, in order. Adjacent rows form one run.
pub fn runs<T: Code>(pieces: &[Piece<T>]) -> impl Iterator<Item = Run<T>> {
    let mut position = 0;
    pieces
        .iter()
        .enumerate()
        .flat_map(|(number, piece)| {
            let whole = piece.rows == 1 || (piece.stride == piece.cols && piece.step == piece.cols);
            let (rows, cols) = if whole { (1, piece.rows * piece.cols) } else { (piece.rows, piece.cols) };
            (0..rows).map(move |row| (number, piece, row, cols))
        })
        .map(move |(number, piece, row, count)| {
            let run = Run {
                old: piece.old.wrapping_add(row * piece.stride),
                new: piece.new.wrapping_add(row * piece.stride),
                count,
                position,
                first: piece.first + row * piece.step,
                piece: number,
            };
            position += count;
            run
        })
}

/// The runs, cut at the block boundaries of the checksum.
pub fn windows<T: Code>(pieces: &[Piece<T>]) -> impl Iterator<Item = Run<T>> {
    let most = BLOCK_BYTES / T::BYTES;
    runs(pieces).flat_map(move |mut left| {
        std::iter::from_fn(move || {
            let count = left.count.min(most - left.first % most);
            let window = Run { count, ..left };
            left = left.after(count);
            (count > 0).then_some(window)
        })
    })
}

/// Split a run into spans of at most one chunk.
#[inline(always)]
pub fn spans<T: Code>(mut run: Run<T>) -> impl Iterator<Item = Span<T>> {
    std::iter::from_fn(move || {
        let blocks = (run.count / BLOCK).min(CHUNK);
        let rest = if blocks == 0 { run.count } else { 0 };
        let span = Span { old: run.old, new: run.new, blocks: blocks.max(1), position: run.position, rest };
        let count = blocks * BLOCK + rest;
        run = run.after(count);
        (count > 0).then_some(span)
    })
}

/// Compute the classes of a span's elements, in `chunk.masks` and `chunk.ranks`.
///
/// # Safety
/// As `Scan`; the span is readable.
#[inline(always)]
pub unsafe fn scan_classes<T: Code, S: Scan>(span: &Span<T>, classes: Classes, chunk: &mut crate::scan::Chunk) {
    if span.rest == 0 {
        return unsafe { S::classes(span.old, span.blocks, classes, chunk) };
    }
    let padded = unsafe { padded(span.old, span.rest) };
    unsafe { S::classes(padded.as_ptr(), 1, classes, chunk) };
    for c in 0..classes.count as usize {
        chunk.masks[0][c] &= (1 << span.rest) - 1;
        chunk.ranks[1][c] = chunk.ranks[0][c] + chunk.masks[0][c].count_ones();
    }
}

/// Compute the changed elements of a span, in `chunk.changed`.
///
/// # Safety
/// As `Scan`; the span is readable.
#[inline(always)]
pub unsafe fn scan_changes<T: Code, S: Scan>(span: &Span<T>, chunk: &mut crate::scan::Chunk) {
    if span.rest == 0 {
        return unsafe { S::changes(span.old, span.new, span.blocks, chunk) };
    }
    let (old, new) = unsafe { (padded(span.old, span.rest), padded(span.new, span.rest)) };
    unsafe { S::changes(old.as_ptr(), new.as_ptr(), 1, chunk) };
}

unsafe fn padded<T: Code>(codes: *const T, count: usize) -> [T; BLOCK] {
    let mut block = [T::ZERO; BLOCK];
    unsafe { std::ptr::copy_nonoverlapping(codes, block.as_mut_ptr(), count) };
    block
}

/// Rice-coded numbers that are being written.
#[derive(Default)]
pub struct NumbersOut {
    pub unary: BitWriter,
    pub low: BitWriter,
    pub escapes: Vec<u32>,
}

impl NumbersOut {
    pub fn clear(&mut self) {
        self.unary.clear();
        self.low.clear();
        self.escapes.clear();
    }

    /// Append numbers in groups of eight: one `put` for eight short quotients, and few for their low bits.
    #[inline(always)]
    pub fn extend(&mut self, numbers: &[u32], low: u32) {
        let Self { unary, low: lows, escapes } = self;
        let count = numbers.len() as u64;
        let (eights, rest) = numbers.as_chunks::<8>();
        unary.extend(count * (CAP as u64 + 1), |unary| {
            for eight in eights {
                let quotients = eight.map(|number| number >> low);
                if quotients.iter().map(|&quotient| quotient as u64).sum::<u64>() < CAP as u64 {
                    unsafe { put_eight(unary, quotients) };
                } else {
                    quotients.iter().for_each(|&quotient| unsafe { put_one(unary, quotient, escapes) });
                }
            }
            rest.iter().for_each(|number| unsafe { put_one(unary, number >> low, escapes) });
        });
        let mask = (1u64 << low) - 1;
        lows.extend(count * low as u64, |lows| {
            for eight in eights {
                let [a, b, c, d, e, f, g, h] = eight.map(|number| number as u64 & mask);
                let pairs = [a | b << low, c | d << low, e | f << low, g | h << low];
                unsafe {
                    if low <= 14 {
                        lows.put(pairs[0] | pairs[1] << (2 * low), 4 * low);
                        lows.put(pairs[2] | pairs[3] << (2 * low), 4 * low);
                    } else if low <= 28 {
                        pairs.iter().for_each(|&pair| lows.put(pair, 2 * low));
                    } else {
                        [a, b, c, d, e, f, g, h].iter().for_each(|&number| lows.put(number, low));
                    }
                }
            }
            rest.iter().for_each(|&number| unsafe { lows.put(number as u64 & mask, low) });
        });
    }
}

/// Append a quotient in unary: zeros, then a one; as an escape if it is at least `CAP`.
///
/// # Safety
/// As `End::put`.
#[inline(always)]
unsafe fn put_one(unary: &mut End, quotient: u32, escapes: &mut Vec<u32>) {
    if quotient >= CAP {
        escapes.push(quotient);
    }
    let zeros = quotient.min(CAP);
    unsafe { unary.put(1 << zeros, zeros + 1) };
}

/// Append eight quotients whose sum is below `CAP`: together they need less than 32 bits.
///
/// # Safety
/// As `End::put`.
#[inline(always)]
unsafe fn put_eight(unary: &mut End, quotients: [u32; 8]) {
    let joined = |(a, m): (u64, u32), (b, n): (u64, u32)| (a | b << m, m + n);
    let [a, b, c, d, e, f, g, h] = quotients.map(|quotient| (1u64 << quotient, quotient + 1));
    let (word, width) = joined(joined(joined(a, b), joined(c, d)), joined(joined(e, f), joined(g, h)));
    unsafe { unary.put(word, width) };
}

/// Rice-coded numbers that are being read. All share the escapes of the tile.
pub struct NumbersIn {
    unary: Unary,
    low: LowBits,
}

impl NumbersIn {
    /// Take both planes: the unary one of `bits` bits, and the low one of `low_bits`.
    ///
    /// # Safety
    /// As for `Plane::new`, for the complete bytes.
    pub unsafe fn take(bytes: &mut Bytes, bits: u64, low_bits: u64) -> Result<Self, Refused> {
        let unary = unsafe { Plane::new(bytes.plane(bits)?, bits) };
        let low = unsafe { Plane::new(bytes.plane(low_bits)?, low_bits) };
        Ok(Self { unary: Unary::new(unary), low: LowBits::new(low) })
    }

    /// Decode the next `count` numbers into `out`. The caller has checked that the low plane is long enough.
    #[inline(always)]
    pub fn next(&mut self, count: usize, low: u32, escapes: &mut Escapes, out: &mut Vec<u32>) -> Result<(), Refused> {
        self.unary.take(count, out)?;
        let limit = u32::MAX >> low;
        for number in out {
            if *number == CAP {
                *number = escapes.take()?;
            }
            if *number > limit {
                return Err("a number has more than 32 bits");
            }
            *number = *number << low | self.low.take(low);
        }
        Ok(())
    }

    pub fn end(&self) -> Result<(), Refused> {
        self.unary.end()
    }
}

/// The escapes of a tile, in the order of its planes.
pub struct Escapes<'a>(pub &'a [u8]);

impl Escapes<'_> {
    #[cold]
    pub fn take(&mut self) -> Result<u32, Refused> {
        let (four, rest) = self.0.split_first_chunk::<4>().ok_or("an escape is missing")?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*four))
    }
}

/// The numbers below `count` that are not in the ascending `list`.
pub fn complement<'a>(list: &[u32], count: u32, out: &'a mut Vec<u32>) -> &'a [u32] {
    out.clear();
    let mut next = 0;
    for &item in list {
        out.extend(next..item);
        next = item + 1;
    }
    out.extend(next..count);
    out
}
