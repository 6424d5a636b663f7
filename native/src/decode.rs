//! Decodes a tile: from its bytes and its old codes to the new codes.

use std::ptr::null;

use crate::bits::{Bytes, LowBits, PADDING, Plane, Refused, rice};
use crate::checksum::{self, BLOCK_BYTES, Part, Sums};
use crate::kind::{Code, Kind, MAX_CLASSES, Step};
use crate::scan::{BLOCK, CHUNK, Chunk, Classes, Places, Portable, Scan};
use crate::tile::{
    CODED, Escapes, INVERTED, NumbersIn, Piece, RAW, Run, Span, complement, num_elements, scan_classes, spans, windows,
};

/// Receives the new codes.
pub trait Sink<T> {
    /// Whether every window of a tile must be opened, even if nothing changes in it.
    const ALL: bool;
    type Pen: Pen<T>;

    /// Announce `count` more changes. Refused if there is no room for them.
    fn expect(&mut self, count: usize) -> Result<(), Refused>;

    /// Start a window: the following changes belong to it.
    ///
    /// # Safety
    /// Its old codes are readable, and the machine has the instructions of `S`.
    unsafe fn open<S: Scan>(&mut self, window: &Run<T>);

    /// Create the value that writes the changes of a window. It must be returned by `take`, with the number of changes,
    /// before the next one is created.
    fn pen(&self) -> Self::Pen;
    fn take(&mut self, pen: Self::Pen, count: usize);

    /// Finish the tile. Refused if there were fewer changes than expected.
    fn close(&mut self) -> Result<(), Refused>;
}

/// Writes changes. A separate value, so that its fields stay in registers.
pub trait Pen<T> {
    /// Write change `number` (from 0, in any order): the code at position `at` of the window changes from `old` to
    /// `new`.
    ///
    /// # Safety
    /// The change was announced; for `InPlace`, the new memory of the window is writable.
    unsafe fn put(&mut self, number: usize, at: usize, old: T, new: T);
}

/// Writes directly into the new memory of the pieces. If the tile is refused, the memory is partly written.
pub struct InPlace<T>(*mut T);

impl<T> Default for InPlace<T> {
    fn default() -> Self {
        Self(std::ptr::null_mut())
    }
}

impl<T: Code> Sink<T> for InPlace<T> {
    const ALL: bool = false;
    type Pen = *mut T;

    fn expect(&mut self, _: usize) -> Result<(), Refused> {
        Ok(())
    }

    #[inline(always)]
    unsafe fn open<S: Scan>(&mut self, window: &Run<T>) {
        self.0 = window.new;
    }

    #[inline(always)]
    fn pen(&self) -> *mut T {
        self.0
    }

    #[inline(always)]
    fn take(&mut self, _: *mut T, _: usize) {}

    fn close(&mut self) -> Result<(), Refused> {
        Ok(())
    }
}

impl<T> Pen<T> for *mut T {
    #[inline(always)]
    unsafe fn put(&mut self, _: usize, at: usize, _: T, new: T) {
        unsafe { self.add(at).write(new) };
    }
}

/// Counts the changes.
#[derive(Default)]
struct Counted(usize);

impl<T> Sink<T> for Counted {
    const ALL: bool = false;
    type Pen = ();

    fn expect(&mut self, count: usize) -> Result<(), Refused> {
        self.0 += count;
        Ok(())
    }

    unsafe fn open<S: Scan>(&mut self, _: &Run<T>) {}

    fn pen(&self) {}

    fn take(&mut self, _: (), _: usize) {}

    fn close(&mut self) -> Result<(), Refused> {
        Ok(())
    }
}

impl<T> Pen<T> for () {
    unsafe fn put(&mut self, _: usize, _: usize, _: T, _: T) {}
}

/// The result for one piece: the number of its changed codes, and what it adds to the checksum of its tensor.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Found {
    pub count: u64,
    pub sums: Sums,
}

/// Lists positions and new codes in memory of the caller. `SUMMED`: also compute what each piece adds to the checksum
/// of its tensor (`Piece::first` is then relative to the tensor), while its codes are in the cache.
pub struct Listed<'a, T, const SUMMED: bool> {
    places: *mut u32,
    codes: *mut T,
    /// Changes that there is room for and that nobody expects yet.
    room: usize,
    found: &'a mut [Found],
    window: Opened,
}

/// The current window of a list.
#[derive(Clone, Copy, Default)]
struct Opened {
    piece: usize,
    /// Its first place.
    first: usize,
    /// Changes that were put.
    count: usize,
    /// Its first byte in its block, and the block's number.
    byte: usize,
    block: u64,
    /// The sums of its old codes, and what its changes add.
    old: [u64; 2],
    more: [u64; 2],
}

/// Lists the changes of one window.
pub struct Lines<T, const SUMMED: bool> {
    places: *mut u32,
    codes: *mut T,
    first: usize,
    byte: usize,
    more: [u64; 2],
}

impl<'a, T, const SUMMED: bool> Listed<'a, T, SUMMED> {
    /// # Safety
    /// Both lists have room for `room` changes, and `found` belongs to the pieces of the tile.
    pub unsafe fn new(places: *mut u32, codes: *mut T, room: usize, found: &'a mut [Found]) -> Self {
        Self { places, codes, room, found, window: Opened::default() }
    }

    #[inline(always)]
    fn shut(&mut self) {
        let window = self.window;
        let Some(found) = self.found.get_mut(window.piece) else { return };
        found.count += window.count as u64;
        if SUMMED {
            found.sums.add_block(window.block, window.old, window.more);
        }
    }
}

impl<T: Code + Part, const SUMMED: bool> Sink<T> for Listed<'_, T, SUMMED> {
    const ALL: bool = SUMMED;
    type Pen = Lines<T, SUMMED>;

    fn expect(&mut self, count: usize) -> Result<(), Refused> {
        self.room = self.room.checked_sub(count).ok_or("more changes than there is room for")?;
        Ok(())
    }

    #[inline(always)]
    unsafe fn open<S: Scan>(&mut self, window: &Run<T>) {
        self.shut();
        self.window = Opened { piece: window.piece, first: window.first, ..Opened::default() };
        if SUMMED {
            let start = window.first * T::BYTES;
            let (block, byte) = (start / BLOCK_BYTES, start % BLOCK_BYTES);
            let sums = |words, first, count| unsafe { S::sums(words, first, count) };
            let old = unsafe { checksum::of_bytes(window.old.cast(), byte, byte + window.count * T::BYTES, sums) };
            (self.window.block, self.window.byte, self.window.old) = (block as u64, byte, old);
        }
    }

    #[inline(always)]
    fn pen(&self) -> Lines<T, SUMMED> {
        let Self { places, codes, window: Opened { first, byte, more, .. }, .. } = *self;
        Lines { places, codes, first, byte, more }
    }

    #[inline(always)]
    fn take(&mut self, pen: Lines<T, SUMMED>, count: usize) {
        (self.places, self.codes) = (self.places.wrapping_add(count), self.codes.wrapping_add(count));
        self.window.count += count;
        self.window.more = pen.more;
    }

    fn close(&mut self) -> Result<(), Refused> {
        self.shut();
        if self.room == 0 { Ok(()) } else { Err("fewer changes than there is room for") }
    }
}

impl<T: Code + Part, const SUMMED: bool> Pen<T> for Lines<T, SUMMED> {
    #[inline(always)]
    unsafe fn put(&mut self, number: usize, at: usize, old: T, new: T) {
        unsafe {
            self.places.add(number).write((self.first + at) as u32);
            self.codes.add(number).write(new);
        }
        if SUMMED {
            self.more = checksum::sum(self.more, checksum::of_change(self.byte + at * T::BYTES, old, new));
        }
    }
}

/// The number of codes that a tile changes, according to its bytes; for a coded tile, only its headers are read.
///
/// # Safety
/// The old memory of the pieces is readable.
pub unsafe fn num_changes<T: Code>(classes: Classes, pieces: &[Piece<T>], coded: &[u8]) -> Result<usize, Refused> {
    let mut counted = Counted::default();
    match coded.split_first() {
        None => {}
        Some((&CODED, rest)) => {
            let (mut bytes, mut left) = (Bytes(rest), num_elements(pieces));
            for _ in 0..classes.count {
                counted.0 += header(&mut bytes, &mut left)?.changed;
            }
            bytes.plane(counted.0 as u64)?; // each has at least a sign
        }
        Some((&RAW, rest)) => unsafe { place_raw::<T, Portable, Counted>(classes.kind, pieces, rest, &mut counted)? },
        _ => return Err(UNKNOWN_MODE),
    }
    Ok(counted.0)
}

/// The changes of one class, as decoded.
#[derive(Default)]
struct Changes {
    header: Header,
    /// Ranks of the listed elements: the changed ones, or where inverted the others.
    listed: Vec<u32>,
    steps: Vec<Step>,
}

#[derive(Clone, Copy, Default)]
struct Header {
    changed: usize,
    low: u32,
    inverted: bool,
    unchanged: usize,
    exceptions: usize,
    size_low: u32,
}

impl Header {
    fn listed(&self) -> usize {
        if self.inverted { self.unchanged } else { self.changed }
    }

    fn exceptions_inverted(&self) -> bool {
        2 * self.exceptions > self.changed
    }

    fn exceptions_listed(&self) -> usize {
        self.exceptions.min(self.changed - self.exceptions)
    }

    fn exceptions_low(&self) -> u32 {
        rice(self.changed as u64, self.exceptions_listed() as u64)
    }
}

/// How much of a class's lists has been used.
#[derive(Clone, Copy)]
struct Used {
    listed: *const u32,
    step: *const Step,
    steps_end: *const Step,
}

/// The working memory of one thread.
pub struct Decoder {
    chunk: Box<Chunk>,
    places: Box<Places>,
    classes: [Changes; MAX_CLASSES],
    /// Classes that list what did not change, a bit each.
    inverted: u32,
    /// The next listed rank of each class; `u32::MAX`: there is none.
    next: [u32; MAX_CLASSES],
    used: [Used; MAX_CLASSES],
    /// The tile's bytes, and `PADDING` behind them.
    padded: Vec<u8>,
    numbers: Vec<u32>,
    others: Vec<u32>,
    exceptions: Vec<u32>,
}

const TOO_LONG: Refused = "a step is longer than the scale";
const UNKNOWN_MODE: Refused = "a tile of an unknown mode";
const PAST_THE_END: Refused = "a position is past the end";
/// A code is prefetched this many changes before it is used: each is in another cache line.
const AHEAD_CHANGES: usize = 48;
/// Maximum length of a unary plane, in bits.
const MAX_BITS: u64 = 1 << 40;

impl Default for Decoder {
    fn default() -> Self {
        Self {
            chunk: Chunk::new(),
            places: Box::new([0; CHUNK * BLOCK + BLOCK]),
            classes: Default::default(),
            inverted: 0,
            next: [u32::MAX; MAX_CLASSES],
            used: [Used { listed: null(), step: null(), steps_end: null() }; MAX_CLASSES],
            padded: Vec::new(),
            numbers: Vec::new(),
            others: Vec::new(),
            exceptions: Vec::new(),
        }
    }
}

impl Decoder {
    /// # Safety
    /// The pieces' old memory is readable, for `InPlace` the new one is writable, and the machine has the
    /// instructions of `S`.
    #[inline(always)]
    pub unsafe fn decode<T: Code, S: Scan, K: Sink<T>>(
        &mut self,
        classes: Classes,
        pieces: &[Piece<T>],
        coded: &[u8],
        sink: &mut K,
    ) -> Result<(), Refused> {
        match coded.split_first() {
            None => unsafe { see_all::<T, S, K>(pieces, sink) },
            Some((&CODED, rest)) => unsafe { self.place_coded::<T, S, K>(classes, pieces, rest, sink)? },
            Some((&RAW, rest)) => unsafe { place_raw::<T, S, K>(classes.kind, pieces, rest, sink)? },
            _ => return Err(UNKNOWN_MODE),
        }
        sink.close()
    }

    #[inline(always)]
    unsafe fn place_coded<T: Code, S: Scan, K: Sink<T>>(
        &mut self,
        classes: Classes,
        pieces: &[Piece<T>],
        coded: &[u8],
        sink: &mut K,
    ) -> Result<(), Refused> {
        self.parse(classes, num_elements(pieces), coded)?;
        let all = &self.classes[..classes.count as usize];
        sink.expect(all.iter().map(|changes| changes.header.changed).sum())?;
        if classes.count == 1 && !all[0].header.inverted {
            return unsafe { self.place_one::<T, S, K>(classes, pieces, sink) };
        }
        self.start(classes);
        for window in windows(pieces) {
            unsafe { sink.open::<S>(&window) };
            for span in spans(window) {
                if K::ALL {
                    fetch_next_block::<T, S>(&span);
                }
                unsafe {
                    scan_classes::<T, S>(&span, classes, &mut self.chunk);
                    self.mark::<S>(span.blocks);
                    self.place::<T, S, K>(classes, &span, span.position - window.position, sink)?;
                }
                self.chunk.ranks[0] = self.chunk.ranks[span.blocks];
            }
        }
        self.end(classes)
    }

    #[inline(always)]
    fn parse(&mut self, classes: Classes, elements: u64, coded: &[u8]) -> Result<(), Refused> {
        let Self { classes: all, padded, numbers, others, exceptions: places, .. } = self;
        padded.clear();
        padded.extend_from_slice(coded);
        padded.extend_from_slice(&[0; PADDING]);
        let mut bytes = Bytes(&padded[..coded.len()]);
        let all = &mut all[..classes.count as usize];
        let mut left = elements;
        for changes in &mut *all {
            changes.header = header(&mut bytes, &mut left)?;
        }
        let headers = all.iter().map(|changes| changes.header);
        let total = |bits: fn(Header) -> u64| headers.clone().map(bits).sum::<u64>();
        let unary = [bytes.varint(MAX_BITS)?, bytes.varint(MAX_BITS)?, bytes.varint(MAX_BITS)?];
        let num_signs = total(|h| h.changed as u64);
        let gaps_low = total(|h| h.listed() as u64 * h.low as u64);
        let exceptions_low = total(|h| h.exceptions_listed() as u64 * h.exceptions_low() as u64);
        let sizes_low = total(|h| h.exceptions as u64 * h.size_low as u64);
        // the padding follows `bytes`
        let (mut signs, mut gaps, mut exceptions, mut sizes) = unsafe {
            (
                LowBits::new(Plane::new(bytes.plane(num_signs)?, num_signs)),
                NumbersIn::take(&mut bytes, unary[0], gaps_low)?,
                NumbersIn::take(&mut bytes, unary[1], exceptions_low)?,
                NumbersIn::take(&mut bytes, unary[2], sizes_low)?,
            )
        };
        let mut escapes = Escapes(bytes.0);
        for changes in &mut *all {
            let header = changes.header;
            gaps.next(header.listed(), header.low, &mut escapes, &mut changes.listed)?;
            from_gaps(&mut changes.listed, elements)?;
            read_signs(&mut changes.steps, header.changed, &mut signs);
        }
        places.clear();
        for changes in &*all {
            let header = changes.header;
            exceptions.next(header.exceptions_listed(), header.exceptions_low(), &mut escapes, numbers)?;
            from_gaps(numbers, header.changed as u64)?;
            if header.exceptions_inverted() {
                places.extend_from_slice(complement(numbers, header.changed as u32, others));
            } else {
                places.extend_from_slice(numbers);
            }
        }
        let most = classes.kind.max_less();
        let mut places = places.as_slice();
        for changes in &mut *all {
            let header = changes.header;
            sizes.next(header.exceptions, header.size_low, &mut escapes, numbers)?;
            let (of_class, rest) = places.split_at(header.exceptions);
            places = rest;
            for (&place, &size) in of_class.iter().zip(&*numbers) {
                if size >= most {
                    return Err(TOO_LONG);
                }
                let step = &mut changes.steps[place as usize];
                *step = Step::new(size + 1, step.down());
            }
        }
        gaps.end()?;
        exceptions.end()?;
        sizes.end()?;
        if escapes.0.is_empty() { Ok(()) } else { Err("bytes are left over") }
    }

    fn start(&mut self, classes: Classes) {
        self.chunk.ranks[0] = [0; MAX_CLASSES];
        (self.inverted, self.next) = (0, [u32::MAX; MAX_CLASSES]);
        for (c, changes) in self.classes[..classes.count as usize].iter_mut().enumerate() {
            changes.listed.push(u32::MAX);
            self.inverted |= (changes.header.inverted as u32) << c;
            self.next[c] = changes.listed[0];
            let steps = changes.steps.as_ptr_range();
            self.used[c] = Used { listed: changes.listed.as_ptr(), step: steps.start, steps_end: steps.end };
        }
    }

    /// A tile of one class with a list of changed positions: no other code is read.
    #[inline(always)]
    unsafe fn place_one<T: Code, S: Scan, K: Sink<T>>(
        &mut self,
        classes: Classes,
        pieces: &[Piece<T>],
        sink: &mut K,
    ) -> Result<(), Refused> {
        let Changes { listed, steps, .. } = &self.classes[0];
        let mut next = 0;
        for window in windows(pieces) {
            unsafe { sink.open::<S>(&window) };
            let Run { old, new, count, position, .. } = window;
            let (mut pen, before) = (sink.pen(), next);
            while let Some(&rank) = listed.get(next)
                && (rank as usize) < position + count
            {
                let at = rank as usize - position;
                if !K::ALL
                    && let Some(&ahead) = listed.get(next + AHEAD_CHANGES)
                {
                    S::fetch(old.wrapping_add((ahead as usize).wrapping_sub(position)));
                    S::fetch(new.wrapping_add((ahead as usize).wrapping_sub(position)));
                }
                let code = unsafe { *old.add(at) };
                let moved = T::narrow(classes.kind.moved(code.widen(), steps[next]));
                unsafe { pen.put(next - before, at, code, moved) };
                next += 1;
            }
            sink.take(pen, next - before);
        }
        if next == listed.len() { Ok(()) } else { Err(PAST_THE_END) }
    }

    /// Mark the changed elements of the blocks of a chunk in `chunk.changed`, from the listed ranks.
    #[inline(always)]
    unsafe fn mark<S: Scan>(&mut self, blocks: usize) {
        let Self { chunk, used, inverted, next, .. } = self;
        let Chunk { masks, ranks, changed } = &mut **chunk;
        for (changed, masks) in changed.iter_mut().zip(&*masks).take(blocks) {
            *changed = 0;
            for c in bits(*inverted) {
                *changed |= masks[c];
            }
        }
        if blocks < CHUNK {
            ranks[blocks + 1..].fill([u32::MAX; MAX_CLASSES]);
        }
        let ends = ranks[blocks];
        for c in bits(unsafe { S::below(next, &ends) }) {
            let used = &mut used[c];
            while next[c] < ends[c] {
                let block = block_of(ranks, c, next[c]);
                changed[block] ^= unsafe { S::nth_bit(masks[block][c], next[c] - ranks[block][c]) };
                // a sentinel follows the last one, beyond all ends
                unsafe {
                    used.listed = used.listed.add(1);
                    next[c] = *used.listed;
                }
            }
        }
    }

    /// Move each marked element by the next step of its class. `at`: the position of the span in its window.
    #[inline(always)]
    unsafe fn place<T: Code, S: Scan, K: Sink<T>>(
        &mut self,
        classes: Classes,
        span: &Span<T>,
        at: usize,
        sink: &mut K,
    ) -> Result<(), Refused> {
        let Self { chunk, places, used, .. } = self;
        let count = unsafe { S::places(&chunk.changed[..span.blocks], places) };
        let mut pen = sink.pen();
        for (number, &place) in places[..count].iter().enumerate() {
            let old = unsafe { *span.old.add(place as usize) };
            let c = classes.kind.class(old.widen(), classes.high, classes.count) & (MAX_CLASSES - 1);
            let used = &mut used[c];
            if used.step == used.steps_end {
                return Err("more elements changed than have a step");
            }
            let step = unsafe { *used.step };
            used.step = used.step.wrapping_add(1);
            unsafe { pen.put(number, at + place as usize, old, T::narrow(classes.kind.moved(old.widen(), step))) };
        }
        sink.take(pen, count);
        Ok(())
    }

    /// Check that all decoded changes were used.
    fn end(&self, classes: Classes) -> Result<(), Refused> {
        let mut all = self.classes[..classes.count as usize].iter().zip(&self.used);
        // a sentinel follows the last one
        if all.all(|(c, used)| used.listed == &c.listed[c.listed.len() - 1] && used.step == used.steps_end) {
            Ok(())
        } else {
            Err(PAST_THE_END)
        }
    }
}

/// Open every window of a tile in which nothing changes, for a sink that needs them all.
///
/// # Safety
/// As `Decoder::decode`.
#[inline(always)]
unsafe fn see_all<T: Code, S: Scan, K: Sink<T>>(pieces: &[Piece<T>], sink: &mut K) {
    if K::ALL {
        windows(pieces).for_each(|window| unsafe { sink.open::<S>(&window) });
    }
}

/// Prefetch the codes one checksum block after a span: the next window is summed first, and would otherwise wait for
/// them.
#[inline(always)]
fn fetch_next_block<T: Code, S: Scan>(span: &Span<T>) {
    let next = span.old.cast::<u8>().wrapping_add(BLOCK_BYTES);
    for line in (0..span.blocks * BLOCK * T::BYTES).step_by(64) {
        S::fetch(next.wrapping_add(line));
    }
}

/// All codes of a raw tile.
///
/// # Safety
/// As `Decoder::decode`.
#[inline(always)]
unsafe fn place_raw<T: Code, S: Scan, K: Sink<T>>(
    kind: Kind,
    pieces: &[Piece<T>],
    raw: &[u8],
    sink: &mut K,
) -> Result<(), Refused> {
    if raw.len() as u64 != num_elements(pieces) * T::BYTES as u64 {
        return Err("a raw tile has another length");
    }
    let mut codes = raw.chunks_exact(T::BYTES).map(T::read);
    if codes.clone().any(|code| !kind.holds(code.widen())) {
        return Err("a code has more bits than its dtype");
    }
    for window in windows(pieces) {
        unsafe { sink.open::<S>(&window) };
        for (at, code) in (0..window.count).zip(&mut codes) {
            let old = unsafe { *window.old.add(at) };
            if old != code {
                sink.expect(1)?;
                let mut pen = sink.pen();
                unsafe { pen.put(0, at, old, code) };
                sink.take(pen, 1);
            }
        }
    }
    Ok(())
}

/// The numbers of the set bits.
#[inline(always)]
fn bits(mut set: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (set != 0).then(|| set.trailing_zeros() as usize % MAX_CLASSES);
        set &= set.wrapping_sub(1);
        lowest
    })
}

/// The block of a chunk that contains a rank of class `c`: the last one that starts at or below it. By bisection: a
/// comparison with all of them at once would gather them, which takes longer.
#[inline(always)]
fn block_of(ranks: &[[u32; MAX_CLASSES]; CHUNK + 1], c: usize, rank: u32) -> usize {
    let mut block = 0;
    for half in [CHUNK / 2, CHUNK / 4, CHUNK / 8] {
        block += if ranks[block + half][c] <= rank { half } else { 0 };
    }
    block
}

/// Parse a class header. `left`: elements of the tile that no class before has marked as changed.
fn header(bytes: &mut Bytes, left: &mut u64) -> Result<Header, Refused> {
    let mut header = Header { changed: bytes.varint(*left)? as usize, ..Header::default() };
    *left -= header.changed as u64;
    if header.changed == 0 {
        return Ok(header);
    }
    let flags = bytes.byte()?;
    if flags & !(INVERTED | 31) != 0 {
        return Err("a class has unknown flags");
    }
    header.low = (flags & 31) as u32;
    header.inverted = flags & INVERTED != 0;
    if header.inverted {
        header.unchanged = bytes.varint(*left)? as usize;
        *left -= header.unchanged as u64;
    }
    header.exceptions = bytes.varint(header.changed as u64)? as usize;
    if header.exceptions > 0 {
        header.size_low = bytes.low()?;
    }
    Ok(header)
}

/// Convert gaps to ascending items below `limit`.
#[inline(always)]
fn from_gaps(numbers: &mut [u32], limit: u64) -> Result<(), Refused> {
    let mut next = 0u64;
    for number in numbers {
        let item = next + *number as u64;
        *number = item as u32;
        next = item + 1;
    }
    if next > limit { Err(PAST_THE_END) } else { Ok(()) }
}

#[inline(always)]
fn read_signs(steps: &mut Vec<Step>, count: usize, signs: &mut LowBits) {
    steps.clear();
    steps.reserve(count);
    for start in (0..count).step_by(32) {
        let some = 32.min(count - start);
        let word = signs.take(some as u32);
        steps.extend((0..some).map(|i| Step::new(0, word >> i & 1 == 1)));
    }
}
