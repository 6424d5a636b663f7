//! Encodes a tile from its two snapshots.

use crate::bits::{BitWriter, CAP, MAX_LOW, put_varint, rice};
use crate::kind::{Code, Kind, MAX_CLASSES, Step};
use crate::scan::{BLOCK, CHUNK, Chunk, Classes, Places, Scan};
use crate::tile::{
    CODED, INVERTED, NumbersOut, Piece, complement, num_elements, runs, scan_changes, scan_classes, spans,
};

/// So many sizes of a class are looked at for their Rice parameter.
const SIZES_TRIED: usize = 1024;
/// What an escape costs: the longest run of zeros, and 32 bits.
const ESCAPE_BITS: u32 = CAP + 32;

/// A changed element as it is found. Its step is computed later, for a complete class at once.
#[derive(Clone, Copy)]
struct Change<T> {
    rank: u32,
    old: T,
    new: T,
}

/// The changed elements of a class.
struct Changes<T> {
    /// In rising order of rank.
    listed: Vec<Change<T>>,
    /// Elements of the class.
    count: u32,
}

impl<T> Default for Changes<T> {
    fn default() -> Self {
        Self { listed: Vec::new(), count: 0 }
    }
}

/// Where the next changes of the classes are written. A separate value, so that it stays in registers and near caches.
struct Tops<T> {
    tops: [*mut Change<T>; MAX_CLASSES],
    /// Changes for which there is room in every class.
    room: usize,
}

impl<T> Tops<T> {
    /// # Safety
    /// There is room, and `class` is below `MAX_CLASSES`.
    #[inline(always)]
    unsafe fn push(&mut self, class: usize, change: Change<T>) {
        unsafe {
            let top = self.tops.get_unchecked_mut(class);
            top.write(change);
            *top = top.add(1);
        }
    }

    /// Reserve room for the changes of a chunk.
    #[inline(always)]
    unsafe fn make_room(&mut self, all: &mut [Changes<T>; MAX_CLASSES]) {
        if self.room < CHUNK * BLOCK {
            unsafe { self.grow(all) };
        }
    }

    #[cold]
    unsafe fn grow(&mut self, all: &mut [Changes<T>; MAX_CLASSES]) {
        unsafe { self.store_lengths(all) };
        self.room = usize::MAX;
        for (Changes { listed, .. }, top) in all.iter_mut().zip(&mut self.tops) {
            listed.reserve(4 * CHUNK * BLOCK);
            self.room = self.room.min(listed.capacity() - listed.len());
            *top = listed.spare_capacity_mut().as_mut_ptr().cast();
        }
    }

    /// Write the number of pushed changes back to the classes.
    ///
    /// # Safety
    /// The tops are of these classes, or empty.
    unsafe fn store_lengths(&self, all: &mut [Changes<T>; MAX_CLASSES]) {
        for (changes, top) in all.iter_mut().zip(&self.tops).filter(|(_, top)| !top.is_null()) {
            unsafe { changes.listed.set_len(top.offset_from(changes.listed.as_ptr()) as usize) };
        }
    }
}

impl<T> Default for Tops<T> {
    fn default() -> Self {
        Self { tops: [std::ptr::null_mut(); MAX_CLASSES], room: 0 }
    }
}

/// The working memory of one thread.
pub struct Encoder<T> {
    chunk: Box<Chunk>,
    places: Box<Places>,
    classes: [Changes<T>; MAX_CLASSES],
    ranks: Vec<u32>,
    steps: Vec<Step>,
    signs: BitWriter,
    gaps: NumbersOut,
    exceptions: NumbersOut,
    sizes: NumbersOut,
    listed: Vec<u32>,
    others: Vec<u32>,
    scratch: Vec<u32>,
}

impl<T> Default for Encoder<T> {
    fn default() -> Self {
        Self {
            chunk: Chunk::new(),
            places: Box::new([0; CHUNK * BLOCK + BLOCK]),
            classes: Default::default(),
            ranks: Vec::new(),
            steps: Vec::new(),
            signs: BitWriter::default(),
            gaps: NumbersOut::default(),
            exceptions: NumbersOut::default(),
            sizes: NumbersOut::default(),
            listed: Vec::new(),
            others: Vec::new(),
            scratch: Vec::new(),
        }
    }
}

impl<T: Code> Encoder<T> {
    /// Encode the tile; empty if nothing changed.
    ///
    /// # Safety
    /// The pieces are readable, and the machine has the instructions of `S`.
    #[inline(always)]
    pub unsafe fn encode<S: Scan>(&mut self, classes: Classes, pieces: &[Piece<T>]) -> Vec<u8> {
        self.clear();
        if classes.count == 1 {
            unsafe { self.collect_one::<S>(pieces) };
        } else {
            unsafe { self.collect::<S>(classes, pieces) };
        }
        if self.classes.iter().all(|changes| changes.listed.is_empty()) {
            return Vec::new();
        }
        self.write(classes)
    }

    fn clear(&mut self) {
        for changes in &mut self.classes {
            changes.listed.clear();
            changes.count = 0;
        }
        for numbers in [&mut self.gaps, &mut self.exceptions, &mut self.sizes] {
            numbers.clear();
        }
        self.signs.clear();
        self.chunk.ranks[0] = [0; MAX_CLASSES];
    }

    #[inline(always)]
    unsafe fn collect<S: Scan>(&mut self, classes: Classes, pieces: &[Piece<T>]) {
        let kind = classes.kind;
        let Self { chunk, places, classes: all, .. } = self;
        let mut tops = Tops::default();
        for run in runs(pieces) {
            for span in spans(run) {
                let num_changed = unsafe {
                    scan_changes::<T, S>(&span, chunk);
                    scan_classes::<T, S>(&span, classes, chunk);
                    tops.make_room(all);
                    S::places(&chunk.changed[..span.blocks], places)
                };
                for &place in &places[..num_changed] {
                    let (block, i) = (place as usize / BLOCK % CHUNK, place as u32 % BLOCK as u32);
                    let (old, new) = unsafe { span.codes_at(place) };
                    let c = kind.class(old.widen(), classes.high, classes.count) % MAX_CLASSES;
                    let before = chunk.masks[block][c] & ((1 << i) - 1);
                    let rank = chunk.ranks[block][c] + before.count_ones();
                    unsafe { tops.push(c, Change { rank, old, new }) };
                }
                tops.room -= num_changed;
                chunk.ranks[0] = chunk.ranks[span.blocks];
            }
        }
        unsafe { tops.store_lengths(all) };
        for (changes, &count) in all.iter_mut().zip(&chunk.ranks[0]) {
            changes.count = count;
        }
    }

    /// Collect the changes of a tile of one class: a rank is a position, so only the comparison is needed.
    #[inline(always)]
    unsafe fn collect_one<S: Scan>(&mut self, pieces: &[Piece<T>]) {
        let Self { chunk, places, classes: all, .. } = self;
        let mut tops = Tops::default();
        for run in runs(pieces) {
            for span in spans(run) {
                let num_changed = unsafe {
                    scan_changes::<T, S>(&span, chunk);
                    tops.make_room(all);
                    S::places(&chunk.changed[..span.blocks], places)
                };
                for &place in &places[..num_changed] {
                    unsafe {
                        let (old, new) = span.codes_at(place);
                        tops.push(0, Change { rank: span.position as u32 + place as u32, old, new });
                    }
                }
                tops.room -= num_changed;
            }
        }
        unsafe { tops.store_lengths(all) };
        all[0].count = num_elements(pieces) as u32;
    }

    #[inline(always)]
    fn write(&mut self, classes: Classes) -> Vec<u8> {
        let mut coded = vec![CODED];
        for c in 0..classes.count as usize {
            self.write_class(classes.kind, c, &mut coded);
        }
        let planes = [&self.gaps, &self.exceptions, &self.sizes];
        for numbers in planes {
            put_varint(&mut coded, numbers.unary.num_bits());
        }
        self.signs.finish_into(&mut coded);
        for numbers in planes {
            numbers.unary.finish_into(&mut coded);
            numbers.low.finish_into(&mut coded);
        }
        for numbers in planes {
            coded.extend(numbers.escapes.iter().flat_map(|value| value.to_le_bytes()));
        }
        coded
    }

    #[inline(always)]
    fn write_class(&mut self, kind: Kind, c: usize, coded: &mut Vec<u8>) {
        let Self { classes, ranks, steps, others, listed, scratch, .. } = self;
        let Changes { listed: changes, count } = &classes[c];
        put_varint(coded, changes.len() as u64);
        if changes.is_empty() {
            return;
        }
        ranks.clear();
        ranks.extend(changes.iter().map(|change| change.rank));
        steps.clear();
        steps.extend(changes.iter().map(|change| kind.step(change.old.widen(), change.new.widen())));
        let inverted = 2 * ranks.len() > *count as usize;
        let list = if inverted { complement(ranks, *count, others) } else { ranks };
        let low = rice(*count as u64, list.len() as u64);
        put_gaps(&mut self.gaps, list, low, scratch);
        put_signs(&mut self.signs, steps);
        coded.push(low as u8 | if inverted { INVERTED } else { 0 });
        if inverted {
            put_varint(coded, list.len() as u64);
        }
        choose_long(steps, listed);
        put_varint(coded, listed.len() as u64);
        if listed.is_empty() {
            return;
        }
        let inverted = 2 * listed.len() > steps.len();
        let list = if inverted { complement(listed, steps.len() as u32, others) } else { &*listed };
        put_gaps(&mut self.exceptions, list, rice(steps.len() as u64, list.len() as u64), scratch);
        for place in &mut *listed {
            *place = steps[*place as usize].less() - 1; // from here on: the size minus 2
        }
        let low = sizes_low(&listed[..listed.len().min(SIZES_TRIED)]);
        coded.push(low as u8);
        self.sizes.extend(listed, low);
    }
}

/// Encode the gaps between ascending items; `scratch` is a reusable buffer.
#[inline(always)]
fn put_gaps(numbers: &mut NumbersOut, list: &[u32], low: u32, scratch: &mut Vec<u32>) {
    scratch.clear();
    scratch.extend(list.first());
    scratch.extend(list.iter().zip(list.iter().skip(1)).map(|(before, item)| item - before - 1));
    numbers.extend(scratch, low);
}

#[inline(always)]
fn put_signs(signs: &mut BitWriter, steps: &[Step]) {
    signs.extend(steps.len() as u64, |end| {
        for some in steps.chunks(32) {
            let word = some.iter().zip(0..).fold(0, |word, (step, i)| word | (step.down() as u64) << i);
            unsafe { end.put(word, some.len() as u32) };
        }
    });
}

/// Append the positions of steps of 2 and more to `out`. Branch-free, since they are rare but unpredictable.
#[inline(always)]
fn choose_long(steps: &[Step], out: &mut Vec<u32>) {
    out.clear();
    out.reserve(steps.len() + 1);
    let start: *mut u32 = out.as_mut_ptr();
    let mut count = 0;
    for (step, place) in steps.iter().zip(0..) {
        unsafe { start.add(count).write(place) };
        count += (step.less() > 0) as usize;
    }
    unsafe { out.set_len(count) };
}

/// The Rice parameter of step sizes: start from the mean and decrease as long as the code gets shorter, since a heavy
/// tail raises the mean.
fn sizes_low(sizes: &[u32]) -> u32 {
    let (count, sum) = (sizes.len() as u64, sizes.iter().map(|&size| size as u64).sum::<u64>());
    let mut low = (0..MAX_LOW).take_while(|&low| (2 * count) << (low + 1) <= 2 * sum + count).count() as u32;
    let bits = |low: u32| {
        let unary = |size: u32| if size >> low < CAP { size >> low } else { ESCAPE_BITS };
        low as u64 * count + sizes.iter().map(|&size| unary(size) as u64).sum::<u64>()
    };
    let mut best = bits(low);
    while low > 0 {
        let shorter = bits(low - 1);
        if shorter >= best {
            break;
        }
        (low, best) = (low - 1, shorter);
    }
    low
}
