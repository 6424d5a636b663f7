//! The checksum of a tensor's codes: two sums modulo 2^64 that detect accidental damage and can be updated from a list
//! of changes.
//!
//! `docs/formats/checksum.md` defines it. It is linear in the data. So the effect of a list of changes follows from the
//! list and the old codes, and parts of a tensor can be summed by any thread. It does not protect against an adversary,
//! who can construct data with the same sums.

use std::ffi::c_void;

use crate::bits::Refused;
use crate::level;
use crate::scan::Level;
use crate::threads;

/// 64-bit words in a block.
pub const WORDS: usize = 1024;
pub const BLOCK_BYTES: usize = 8 * WORDS;
/// Offset of the second sum's keys from those of the first, in 64-bit words.
const SHIFT: usize = 8;
/// Blocks that a thread sums at a time.
const BATCH: usize = 64;

const WORD_SEED: u64 = 0x6574_7564_6520_7731;
const BLOCK_SEED: u64 = 0x6574_7564_6520_6232;

/// The arguments of `etude_checksum`: `num_bytes` from `start`, and their change: `other` (as many bytes), or `count`
/// codes of `width` bytes at ascending `places`, or none if both are null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ChecksumRequest {
    pub start: *const u8,
    pub num_bytes: u64,
    pub other: *const u8,
    pub places: *const u32,
    pub codes: *const c_void,
    pub count: u64,
    pub width: u64,
    /// Number of the first block.
    pub first_block: u64,
    pub threads: u32,
    pub level: u32,
}

unsafe impl Sync for ChecksumRequest {}

/// The two sums of the bytes before and after the change.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Sums {
    pub old: [u64; 2],
    pub new: [u64; 2],
}

impl Sums {
    /// Add block `number`: its old bytes have the sums `old`, and its changes add `more`.
    #[inline(always)]
    pub fn add_block(&mut self, number: u64, old: [u64; 2], more: [u64; 2]) {
        for i in 0..2 {
            let factor = mixed(BLOCK_SEED, number.wrapping_mul(2).wrapping_add(i as u64)) | 1;
            self.old[i] = self.old[i].wrapping_add(factor.wrapping_mul(old[i]));
            self.new[i] = self.new[i].wrapping_add(factor.wrapping_mul(old[i].wrapping_add(more[i])));
        }
    }

    pub fn add(&mut self, other: &Sums) {
        self.old = sum(self.old, other.old);
        self.new = sum(self.new, other.new);
    }
}

#[inline(always)]
pub fn sum(a: [u64; 2], b: [u64; 2]) -> [u64; 2] {
    [a[0].wrapping_add(b[0]), a[1].wrapping_add(b[1])]
}

/// Keys of the low and of the high halves of words, aligned to cache lines.
#[repr(align(64))]
struct Keys([[u64; WORDS + SHIFT]; 2]);

static KEYS: Keys = keys();

const fn keys() -> Keys {
    let mut keys = [[0; WORDS + SHIFT]; 2];
    let mut i = 0;
    while i < WORDS + SHIFT {
        keys[0][i] = mixed(WORD_SEED, 2 * i as u64);
        keys[1][i] = mixed(WORD_SEED, 2 * i as u64 + 1);
        i += 1;
    }
    Keys(keys)
}

/// The `i`th number of the splitmix64 sequence of a seed.
const fn mixed(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The contribution of half a word: `half` 0 is its low 32 bits, 1 its high ones.
#[inline(always)]
fn of_half(value: u64, word: usize, half: usize) -> [u64; 2] {
    let keys = &KEYS.0[half & 1];
    let word = word % WORDS;
    [value.wrapping_mul(keys[word]), value.wrapping_mul(keys[word + SHIFT])]
}

#[inline(always)]
fn of_word(value: u64, word: usize) -> [u64; 2] {
    sum(of_half(value & u32::MAX as u64, word, 0), of_half(value >> 32, word, 1))
}

/// The sums of `count` words of a block, starting with word `first`; `words` points to it and may be unaligned.
///
/// # Safety
/// The words are readable and do not exceed the block.
pub unsafe fn of_words(words: *const u64, first: usize, count: usize) -> [u64; 2] {
    (0..count).fold([0; 2], |sums, i| {
        let word = u64::from_le_bytes(unsafe { words.add(i).cast::<[u8; 8]>().read() });
        sum(sums, of_word(word, first + i))
    })
}

#[cfg(target_arch = "x86_64")]
pub mod x86 {
    use super::{KEYS, SHIFT, WORDS, sum};
    use std::arch::x86_64::*;

    /// Like `of_words`, eight words at a time.
    ///
    /// # Safety
    /// As `of_words`; the processor has AVX-512F and AVX-512DQ.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub unsafe fn of_words_512(words: *const u64, first: usize, count: usize) -> [u64; 2] {
        debug_assert!(first + count <= WORDS);
        let half = _mm512_set1_epi64(u32::MAX as i64);
        let load = |from: *const u64, i: usize, some: __mmask8| unsafe {
            _mm512_maskz_loadu_epi64(some, from.wrapping_add(i).cast())
        };
        let keys = |i: usize, some: __mmask8| [load(KEYS.0[0].as_ptr(), i, some), load(KEYS.0[1].as_ptr(), i, some)];
        // the keys of the second sum equal those of the first sum for the next eight words
        let (mut now, mut sums) = (keys(first, 0xFF), [_mm512_setzero_si512(); 4]);
        let mut add = |i: usize, some: __mmask8| {
            let (word, next) = (load(words, i, some), keys(first + i + SHIFT, some));
            let halves = [_mm512_and_si512(word, half), _mm512_srli_epi64::<32>(word)];
            for which in 0..2 {
                sums[which] = _mm512_add_epi64(sums[which], _mm512_mullo_epi64(halves[which], now[which]));
                sums[2 + which] = _mm512_add_epi64(sums[2 + which], _mm512_mullo_epi64(halves[which], next[which]));
            }
            now = next;
        };
        let whole = count - count % 8;
        for i in (0..whole).step_by(8) {
            add(i, 0xFF);
        }
        if whole < count {
            add(whole, (1 << (count - whole)) - 1);
        }
        let total = |a, b| _mm512_reduce_add_epi64(_mm512_add_epi64(a, b)) as u64;
        [total(sums[0], sums[1]), total(sums[2], sums[3])]
    }

    /// Like `of_words`, four words at a time: a product modulo 2^64 is computed from two 32-bit products.
    ///
    /// # Safety
    /// As `of_words`; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn of_words_256(words: *const u64, first: usize, count: usize) -> [u64; 2] {
        debug_assert!(first + count <= WORDS);
        let at = |from: *const u64, i: usize| unsafe { _mm256_loadu_si256(from.add(i).cast()) };
        // for each sum: the part added at the low end, and the part added 32 bits higher
        let mut sums = [[_mm256_setzero_si256(); 2]; 2];
        let whole = count - count % 4;
        for i in (0..whole).step_by(4) {
            let low = at(words, i);
            let high = _mm256_srli_epi64::<32>(low);
            for (which, [sum, raised]) in sums.iter_mut().enumerate() {
                for (half, keys) in [(low, &KEYS.0[0]), (high, &KEYS.0[1])] {
                    let key = at(keys.as_ptr(), first + i + SHIFT * which);
                    *sum = _mm256_add_epi64(*sum, _mm256_mul_epu32(half, key));
                    *raised = _mm256_add_epi64(*raised, _mm256_mul_epu32(half, _mm256_srli_epi64::<32>(key)));
                }
            }
        }
        let sums = sums.map(|[sum, raised]| {
            let all = _mm256_add_epi64(sum, _mm256_slli_epi64::<32>(raised));
            let mut lanes = [0u64; 4];
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), all) };
            lanes.iter().fold(0u64, |sum, &lane| sum.wrapping_add(lane))
        });
        sum(sums, unsafe { super::of_words(words.wrapping_add(whole), first + whole, count - whole) })
    }
}

/// The sums of the bytes `from` to `upto` of a block; `start` points to the first of them. `words` sums the complete
/// words among them, like `of_words`.
///
/// # Safety
/// The bytes are readable; `from <= upto <= BLOCK_BYTES`.
#[inline(always)]
pub unsafe fn of_bytes(
    start: *const u8,
    from: usize,
    upto: usize,
    words: impl Fn(*const u64, usize, usize) -> [u64; 2],
) -> [u64; 2] {
    let first = from.next_multiple_of(8).min(upto);
    let last = first + (upto - first) / 8 * 8;
    let mut sums = words(start.wrapping_add(first - from).cast(), first / 8, (last - first) / 8);
    for (a, b) in [(from, first), (last, upto)] {
        if a < b {
            let mut bytes = [0u8; 8];
            let part = &mut bytes[a % 8..a % 8 + (b - a)];
            unsafe { std::ptr::copy_nonoverlapping(start.add(a - from), part.as_mut_ptr(), b - a) };
            sums = sum(sums, of_word(u64::from_le_bytes(bytes), a / 8));
        }
    }
    sums
}

/// A code as a part of 32-bit words.
pub trait Part: Copy {
    fn bits(self) -> u64;
}

macro_rules! part {
    ($type:ty) => {
        impl Part for $type {
            #[inline(always)]
            fn bits(self) -> u64 {
                self as u64
            }
        }
    };
}

part!(u8);
part!(u16);
part!(u32);
part!(u64);

/// The amount that a changed code adds to its block's sums. `byte`: its offset in the block.
#[inline(always)]
pub fn of_change<T: Part>(byte: usize, before: T, after: T) -> [u64; 2] {
    let (word, before, after) = (byte / 8, before.bits(), after.bits());
    if size_of::<T>() < 8 {
        return of_half(after.wrapping_sub(before) << (8 * (byte & 3)), word, byte >> 2);
    }
    let low = (after & u32::MAX as u64).wrapping_sub(before & u32::MAX as u64);
    sum(of_half(low, word, 0), of_half((after >> 32).wrapping_sub(before >> 32), word, 1))
}

/// Compute the sums over all blocks. Refused if a position is out of range or positions do not ascend.
///
/// # Safety
/// Everything that `request` describes is readable; `places` and `codes` have `count` items.
pub unsafe fn summed(request: &ChecksumRequest) -> Result<Sums, Refused> {
    let level = Level::of(request.level).ok_or("no level")?;
    unsafe {
        match request.width {
            1 => over::<u8>(request, level),
            2 => over::<u16>(request, level),
            4 => over::<u32>(request, level),
            8 => over::<u64>(request, level),
            _ => Err("no width"),
        }
    }
}

unsafe fn over<T: Part + Sync>(request: &ChecksumRequest, level: Level) -> Result<Sums, Refused> {
    let count = if request.places.is_null() { 0 } else { request.count as usize };
    let (places, codes): (&[u32], &[T]) = if count == 0 {
        (&[], &[])
    } else {
        unsafe {
            (std::slice::from_raw_parts(request.places, count), std::slice::from_raw_parts(request.codes.cast(), count))
        }
    };
    let blocks = (request.num_bytes as usize).div_ceil(BLOCK_BYTES);
    let per_block = BLOCK_BYTES / size_of::<T>();
    let elements = request.num_bytes as usize / size_of::<T>();
    let parts = threads::over(
        request.threads as usize,
        blocks.div_ceil(BATCH),
        || (),
        |(), batch| {
            let mut sums = Sums::default();
            let first = batch * BATCH;
            let mut next = places.partition_point(|&place| (place as usize) < first * per_block);
            for block in first..blocks.min(first + BATCH) {
                let old = unsafe { sums_at(level, request.start, block, request.num_bytes) };
                let mut more = [0; 2];
                if !request.other.is_null() {
                    let new = unsafe { sums_at(level, request.other, block, request.num_bytes) };
                    more = [new[0].wrapping_sub(old[0]), new[1].wrapping_sub(old[1])];
                } else if next < count {
                    let end = elements.min((block + 1) * per_block);
                    while next < count && (places[next] as usize) < end {
                        if next > 0 && places[next] <= places[next - 1] {
                            return Err("places do not rise");
                        }
                        let at = places[next] as usize;
                        let before = unsafe { *request.start.cast::<T>().add(at) };
                        more = sum(more, of_change(at % per_block * size_of::<T>(), before, codes[next]));
                        next += 1;
                    }
                }
                sums.add_block(request.first_block.wrapping_add(block as u64), old, more);
            }
            Ok((sums, next))
        },
    );
    let mut all = Sums::default();
    let mut used = 0;
    for part in parts {
        let (sums, next) = part?;
        all.add(&sums);
        used = used.max(next);
    }
    if count > 0 && used < count {
        return Err("a place lies outside");
    }
    Ok(all)
}

/// The sums of block `block` of the memory at `start`; bytes after the end count as zeros.
unsafe fn sums_at(level: Level, start: *const u8, block: usize, num_bytes: u64) -> [u64; 2] {
    let from = unsafe { start.add(block * BLOCK_BYTES) };
    let left = num_bytes as usize - block * BLOCK_BYTES;
    unsafe { of_bytes(from, 0, left.min(BLOCK_BYTES), |words, first, count| level::sums(level, words, first, count)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_block_have_the_sums_of_the_whole_wherever_it_is_cut() {
        let bytes: Vec<u8> = (0..BLOCK_BYTES).map(|i| (mixed(7, i as u64) & 255) as u8).collect();
        let words = |words, first, count| unsafe { of_words(words, first, count) };
        let whole = unsafe { of_bytes(bytes.as_ptr(), 0, BLOCK_BYTES, words) };
        for cut in [0, 1, 7, 8, 9, 20, 4095, 8191, 8192] {
            for end in [cut, (cut + 3).min(BLOCK_BYTES), BLOCK_BYTES] {
                let parts = [(0, cut), (cut, end), (end, BLOCK_BYTES)];
                let found = parts.iter().fold([0; 2], |sums, &(from, upto)| {
                    sum(sums, unsafe { of_bytes(bytes.as_ptr().add(from), from, upto, words) })
                });
                assert_eq!(found, whole);
            }
        }
    }

    #[test]
    fn every_level_sums_any_number_of_words_from_any_address() {
        let bytes: Vec<u8> = (0..BLOCK_BYTES + 8).map(|i| (mixed(9, i as u64) & 255) as u8).collect();
        for level in [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|&level| level <= Level::best()) {
            for (offset, first, count) in
                [(0, 0, 1024), (3, 0, 1023), (1, 5, 1019), (0, 1017, 7), (2, 9, 0), (5, 1, 12)]
            {
                let words = unsafe { bytes.as_ptr().add(offset) }.cast();
                let found = unsafe { level::sums(level, words, first, count) };
                assert_eq!(found, unsafe { of_words(words, first, count) });
            }
        }
    }

    #[test]
    fn a_change_adds_what_the_new_bytes_have_more() {
        let mut block = [0u16; BLOCK_BYTES / 2];
        block.iter_mut().enumerate().for_each(|(i, code)| *code = mixed(3, i as u64) as u16);
        let words = |words, first, count| unsafe { of_words(words, first, count) };
        let sums = |block: &[u16; BLOCK_BYTES / 2]| unsafe { of_bytes(block.as_ptr().cast(), 0, BLOCK_BYTES, words) };
        for at in [0, 1, 2, 3, 4000, 4095] {
            let before = sums(&block);
            let more = of_change(2 * at, block[at], !block[at]);
            block[at] = !block[at];
            assert_eq!(sum(before, more), sums(&block));
        }
    }
}
