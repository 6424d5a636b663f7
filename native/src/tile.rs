//! A tile: which codes it covers, and the parts of its encoding that both directions share.

use crate::bits::{BitWriter, Bytes, CAP, LowBits, Plane, Refused, Unary};
use crate::kind::Code;
use crate::scan::{BLOCK, CHUNK, Classes, Scan};

/// Most elements of a tile.
pub const MAX_ELEMENTS: u64 = 1 << 23;
/// First byte of a coded tile, and of one that holds the new codes as they are.
pub const CODED: u8 = 1;
pub const RAW: u8 = 2;
pub const INVERTED: u8 = 1 << 5;

/// Rows of codes: `old` is read, `new` is read by the encoder and written by `apply`, which may be given the same
/// memory for both.
#[derive(Clone, Copy)]
pub struct Piece<T> {
    pub old: *const T,
    pub new: *mut T,
    pub rows: usize,
    pub cols: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// Neighbouring codes of a tile: `count` of them, the first at `position` in the tile.
#[derive(Clone, Copy)]
pub struct Run<T> {
    pub old: *const T,
    pub new: *mut T,
    pub count: usize,
    pub position: usize,
}

/// Some blocks of a run, or its last, partial block.
pub struct Span<T> {
    pub old: *const T,
    pub new: *mut T,
    pub blocks: usize,
    pub position: usize,
    /// Elements of the last block; 0: it is full.
    pub rest: usize,
}

impl<T: Code> Span<T> {
    /// The old and the new code at a place of the span.
    ///
    /// # Safety
    /// Both are readable there.
    #[inline(always)]
    pub unsafe fn codes_at(&self, place: u16) -> (u32, u32) {
        let at = place as usize;
        unsafe { ((*self.old.add(at)).widen(), (*self.new.add(at)).widen()) }
    }
}

pub fn num_elements<T>(pieces: &[Piece<T>]) -> u64 {
    pieces.iter().map(|p| p.rows as u64 * p.cols as u64).sum()
}

/// The runs of a tile in order. Rows that touch are one run.
pub fn runs<T: Code>(pieces: &[Piece<T>]) -> impl Iterator<Item = Run<T>> {
    let mut position = 0;
    pieces
        .iter()
        .flat_map(|piece| {
            let whole = piece.stride == piece.cols || piece.rows == 1;
            let (rows, cols) = if whole { (1, piece.rows * piece.cols) } else { (piece.rows, piece.cols) };
            (0..rows).map(move |row| {
                let at = row * piece.stride;
                (piece.old.wrapping_add(at), piece.new.wrapping_add(at), cols)
            })
        })
        .map(move |(old, new, count)| {
            let run = Run { old, new, count, position };
            position += count;
            run
        })
}

/// A run in spans of at most a chunk.
#[inline(always)]
pub fn spans<T: Code>(mut run: Run<T>) -> impl Iterator<Item = Span<T>> {
    std::iter::from_fn(move || {
        let blocks = (run.count / BLOCK).min(CHUNK);
        let rest = if blocks == 0 { run.count } else { 0 };
        let span = Span { old: run.old, new: run.new, blocks: blocks.max(1), position: run.position, rest };
        let count = blocks * BLOCK + rest;
        run.old = run.old.wrapping_add(count);
        run.new = run.new.wrapping_add(count);
        run.count -= count;
        run.position += count;
        (count > 0).then_some(span)
    })
}

/// The classes of a span's elements, into `chunk.masks` and `chunk.ranks`.
///
/// # Safety
/// As `Scan`; the span is readable.
#[inline(always)]
pub unsafe fn scan_classes<T: Code, S: Scan>(span: &Span<T>, classes: Classes, chunk: &mut crate::scan::Chunk) {
    if span.rest == 0 {
        return unsafe { S::classes(span.old, span.new, span.blocks, classes, chunk) };
    }
    let padded = unsafe { padded(span.old, span.rest) };
    unsafe { S::classes(padded.as_ptr(), padded.as_ptr(), 1, classes, chunk) };
    for c in 0..classes.count as usize {
        chunk.masks[0][c] &= (1 << span.rest) - 1;
        chunk.ranks[1][c] = chunk.ranks[0][c] + chunk.masks[0][c].count_ones();
    }
}

/// The changed elements of a span, into `chunk.changed`.
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

/// Rice numbers on their way out.
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

    /// Append numbers, of which there are at most `count`.
    #[inline(always)]
    pub fn extend(&mut self, count: usize, low: u32, numbers: impl Iterator<Item = u32>) {
        let Self { unary, low: lows, escapes } = self;
        unary.extend(count as u64 * (CAP as u64 + 1), |unary| {
            lows.extend(count as u64 * low as u64, |lows| {
                for number in numbers {
                    let quotient = number >> low;
                    let zeros = quotient.min(CAP);
                    if quotient >= CAP {
                        escapes.push(quotient);
                    }
                    unsafe {
                        unary.put(1 << zeros, zeros + 1);
                        lows.put((number & ((1 << low) - 1)) as u64, low);
                    }
                }
            })
        });
    }
}

/// Rice numbers on their way in; escapes come from the tile's one list.
pub struct NumbersIn {
    unary: Unary,
    low: LowBits,
}

impl NumbersIn {
    /// Takes both planes: the unary one of `bits` bits, the low one of `low_bits`.
    ///
    /// # Safety
    /// As `Plane::new`, for the bytes as a whole.
    pub unsafe fn take(bytes: &mut Bytes, bits: u64, low_bits: u64) -> Result<Self, Refused> {
        let unary = unsafe { Plane::new(bytes.plane(bits)?, bits) };
        let low = unsafe { Plane::new(bytes.plane(low_bits)?, low_bits) };
        Ok(Self { unary: Unary::new(unary), low: LowBits::new(low) })
    }

    /// The next `count` numbers, into `out`. The low plane was checked to hold their bits.
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

/// The tile's escapes, in the order of its planes.
pub struct Escapes<'a>(pub &'a [u8]);

impl Escapes<'_> {
    #[cold]
    pub fn take(&mut self) -> Result<u32, Refused> {
        let (four, rest) = self.0.split_first_chunk::<4>().ok_or("an escape is missing")?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*four))
    }
}

/// What is below `count` and not in the rising `list`.
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
