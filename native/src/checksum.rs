//! The checksum of a tensor's codes: two sums modulo 2^64 that show accidents, and that follow changes.
//!
//! `docs/formats/checksum.md` defines it. It is linear in the data, so what a list of changes adds to it is known from
//! the list and the old codes alone, and pieces of a tensor may be summed by any thread. It is no proof against an
//! adversary, who could choose other data with the same sums.

use std::ffi::c_void;

use crate::bits::Refused;
use crate::level;
use crate::scan::Level;
use crate::threads;

/// Words of 64 bits in a block.
pub const WORDS: usize = 1024;
const BLOCK_BYTES: usize = 8 * WORDS;
/// How far the keys of the second sum lie behind those of the first, in 64-bit words.
const SHIFT: usize = 8;
/// Blocks that a thread sums at a time.
const BATCH: usize = 64;

const WORD_SEED: u64 = 0x6574_7564_6520_7731;
const BLOCK_SEED: u64 = 0x6574_7564_6520_6232;

/// What `etude_checksum` is asked: `num_bytes` from `start`, and what becomes of them: `other`, bytes of the same
/// number, or `count` codes of `width` bytes at rising `places`, or nothing where both are null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawSummed {
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

unsafe impl Sync for RawSummed {}

/// Both sums, of the bytes as they are and as they will be.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Sums {
    pub old: [u64; 2],
    pub new: [u64; 2],
}

/// Keys of the low and of the high half of each word.
pub struct Keys {
    low: [u64; WORDS + SHIFT],
    high: [u64; WORDS + SHIFT],
}

static KEYS: Keys = keys();

const fn keys() -> Keys {
    let mut keys = Keys { low: [0; WORDS + SHIFT], high: [0; WORDS + SHIFT] };
    let mut i = 0;
    while i < WORDS + SHIFT {
        keys.low[i] = mixed(WORD_SEED, 2 * i as u64);
        keys.high[i] = mixed(WORD_SEED, 2 * i as u64 + 1);
        i += 1;
    }
    keys
}

/// The `i`th number of the splitmix64 sequence of a seed.
const fn mixed(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The sums of one block.
pub fn of_block(words: &[u64; WORDS]) -> [u64; 2] {
    let (mut first, mut second) = (0u64, 0u64);
    for (at, &word) in words.iter().enumerate() {
        let (low, high) = (word & u32::MAX as u64, word >> 32);
        first = first.wrapping_add(low.wrapping_mul(KEYS.low[at])).wrapping_add(high.wrapping_mul(KEYS.high[at]));
        let at = at + SHIFT;
        second = second.wrapping_add(low.wrapping_mul(KEYS.low[at])).wrapping_add(high.wrapping_mul(KEYS.high[at]));
    }
    [first, second]
}

#[cfg(target_arch = "x86_64")]
pub mod x86 {
    use super::{KEYS, SHIFT, WORDS};
    use std::arch::x86_64::*;

    /// The same, eight words at a time.
    ///
    /// # Safety
    /// The processor has AVX-512F and AVX-512DQ.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub unsafe fn of_block_512(words: &[u64; WORDS]) -> [u64; 2] {
        let at = |from: *const u64, i: usize| unsafe { _mm512_loadu_si512(from.add(i).cast()) };
        let half = _mm512_set1_epi64(u32::MAX as i64);
        let mut sums = [_mm512_setzero_si512(); 4];
        for i in (0..WORDS).step_by(8) {
            let word = at(words.as_ptr(), i);
            let (low, high) = (_mm512_and_si512(word, half), _mm512_srli_epi64::<32>(word));
            let products = [
                _mm512_mullo_epi64(low, at(KEYS.low.as_ptr(), i)),
                _mm512_mullo_epi64(high, at(KEYS.high.as_ptr(), i)),
                _mm512_mullo_epi64(low, at(KEYS.low.as_ptr(), i + SHIFT)),
                _mm512_mullo_epi64(high, at(KEYS.high.as_ptr(), i + SHIFT)),
            ];
            for (sum, product) in sums.iter_mut().zip(products) {
                *sum = _mm512_add_epi64(*sum, product);
            }
        }
        let total = |a, b| _mm512_reduce_add_epi64(_mm512_add_epi64(a, b)) as u64;
        [total(sums[0], sums[1]), total(sums[2], sums[3])]
    }

    /// The same, four words at a time: a product modulo 2^64 is two of 32 bits by 32.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn of_block_256(words: &[u64; WORDS]) -> [u64; 2] {
        let at = |from: *const u64, i: usize| unsafe { _mm256_loadu_si256(from.add(i).cast()) };
        // of each sum what goes to the low end, and what goes 32 bits higher
        let mut sums = [[_mm256_setzero_si256(); 2]; 2];
        for i in (0..WORDS).step_by(4) {
            let low = at(words.as_ptr(), i);
            let high = _mm256_srli_epi64::<32>(low);
            for (which, [sum, raised]) in sums.iter_mut().enumerate() {
                for (half, keys) in [(low, &KEYS.low), (high, &KEYS.high)] {
                    let key = at(keys.as_ptr(), i + SHIFT * which);
                    *sum = _mm256_add_epi64(*sum, _mm256_mul_epu32(half, key));
                    *raised = _mm256_add_epi64(*raised, _mm256_mul_epu32(half, _mm256_srli_epi64::<32>(key)));
                }
            }
        }
        sums.map(|[sum, raised]| {
            let all = _mm256_add_epi64(sum, _mm256_slli_epi64::<32>(raised));
            let mut lanes = [0u64; 4];
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), all) };
            lanes.iter().fold(0, |total: u64, lane| total.wrapping_add(*lane))
        })
    }
}

/// A code of a changed element, as the words of 32 bits that it is part of see it.
trait Part: Copy {
    fn widen(self) -> u64;
}

macro_rules! part {
    ($type:ty) => {
        impl Part for $type {
            #[inline(always)]
            fn widen(self) -> u64 {
                self as u64
            }
        }
    };
}

part!(u8);
part!(u16);
part!(u32);
part!(u64);

/// What changes add to the sums of a block: `from` is the block's first element, as `places` count.
#[inline(always)]
unsafe fn of_changes<T: Part>(old: *const T, places: &[u32], codes: &[T], from: usize) -> [u64; 2] {
    let (mut first, mut second) = (0u64, 0u64);
    let mut add = |word: usize, high: bool, moved: u64| {
        let keys = if high { &KEYS.high } else { &KEYS.low };
        first = first.wrapping_add(moved.wrapping_mul(keys[word]));
        second = second.wrapping_add(moved.wrapping_mul(keys[word + SHIFT]));
    };
    for (&place, &code) in places.iter().zip(codes) {
        let at = place as usize;
        let (before, after) = (unsafe { *old.add(at) }.widen(), code.widen());
        let byte = (at - from) * size_of::<T>();
        let word = byte / 8 % WORDS;
        if size_of::<T>() == 8 {
            add(word, false, (after & u32::MAX as u64).wrapping_sub(before & u32::MAX as u64));
            add(word, true, (after >> 32).wrapping_sub(before >> 32));
        } else {
            add(word, byte & 4 != 0, after.wrapping_sub(before) << (8 * (byte & 3)));
        }
    }
    [first, second]
}

/// Sums over all blocks. Refused where a place lies outside, or places do not rise.
///
/// # Safety
/// What `asked` describes is readable, and `places` and `codes` have `count` items.
pub unsafe fn summed(asked: &RawSummed) -> Result<Sums, Refused> {
    let level = Level::of(asked.level).ok_or("no level")?;
    unsafe {
        match asked.width {
            1 => over::<u8>(asked, level),
            2 => over::<u16>(asked, level),
            4 => over::<u32>(asked, level),
            8 => over::<u64>(asked, level),
            _ => Err("no width"),
        }
    }
}

unsafe fn over<T: Part + Sync>(asked: &RawSummed, level: Level) -> Result<Sums, Refused> {
    let count = if asked.places.is_null() { 0 } else { asked.count as usize };
    let (places, codes): (&[u32], &[T]) = if count == 0 {
        (&[], &[])
    } else {
        unsafe {
            (std::slice::from_raw_parts(asked.places, count), std::slice::from_raw_parts(asked.codes.cast(), count))
        }
    };
    let blocks = (asked.num_bytes as usize).div_ceil(BLOCK_BYTES);
    let per_block = BLOCK_BYTES / size_of::<T>();
    let elements = asked.num_bytes as usize / size_of::<T>();
    let parts = threads::over(
        asked.threads as usize,
        blocks.div_ceil(BATCH),
        || (),
        |(), batch| {
            let mut sums = Sums::default();
            let first = batch * BATCH;
            let mut next = places.partition_point(|&place| (place as usize) < first * per_block);
            for block in first..blocks.min(first + BATCH) {
                let old = unsafe { sums_at(level, asked.start, block, asked.num_bytes) };
                let mut new = old;
                if !asked.other.is_null() {
                    new = unsafe { sums_at(level, asked.other, block, asked.num_bytes) };
                } else if next < count {
                    let end = elements.min((block + 1) * per_block);
                    let some = next;
                    while next < count && (places[next] as usize) < end {
                        if next > 0 && places[next] <= places[next - 1] {
                            return Err("places do not rise");
                        }
                        next += 1;
                    }
                    let (places, codes) = (&places[some..next], &codes[some..next]);
                    let more = unsafe { of_changes(asked.start.cast::<T>(), places, codes, block * per_block) };
                    new = [new[0].wrapping_add(more[0]), new[1].wrapping_add(more[1])];
                }
                let number = asked.first_block.wrapping_add(block as u64);
                for i in 0..2 {
                    let factor = mixed(BLOCK_SEED, number.wrapping_mul(2).wrapping_add(i as u64)) | 1;
                    sums.old[i] = sums.old[i].wrapping_add(factor.wrapping_mul(old[i]));
                    sums.new[i] = sums.new[i].wrapping_add(factor.wrapping_mul(new[i]));
                }
            }
            Ok((sums, next))
        },
    );
    let mut all = Sums::default();
    let mut used = 0;
    for part in parts {
        let (sums, next) = part?;
        for i in 0..2 {
            all.old[i] = all.old[i].wrapping_add(sums.old[i]);
            all.new[i] = all.new[i].wrapping_add(sums.new[i]);
        }
        used = used.max(next);
    }
    if count > 0 && used < count {
        return Err("a place lies outside");
    }
    Ok(all)
}

/// The sums of the block of this number from `start`; what lies behind the last byte counts as zeros.
unsafe fn sums_at(level: Level, start: *const u8, block: usize, num_bytes: u64) -> [u64; 2] {
    let from = unsafe { start.add(block * BLOCK_BYTES) };
    let left = num_bytes as usize - block * BLOCK_BYTES;
    if left >= BLOCK_BYTES && from.align_offset(align_of::<u64>()) == 0 {
        return unsafe { level::sums_of_block(level, &*from.cast()) };
    }
    let mut words = [0u64; WORDS];
    unsafe { std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast::<u8>(), left.min(BLOCK_BYTES)) };
    unsafe { level::sums_of_block(level, &words) }
}
