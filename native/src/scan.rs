//! The pass over the codes themselves: which of 64 elements changed, and their classes.
//!
//! A class index has four bits. The four bit planes of 64 elements give the mask of every class, and its population
//! count advances the rank of that class. One portable implementation is compiled for the baseline and for AVX2;
//! AVX-512 has its own. All three produce the same masks.

use crate::checksum;
use crate::kind::{Code, Kind, MAX_CLASSES};

pub const BLOCK: usize = 64;
/// Blocks that are processed together: their masks stay in the L1 cache.
pub const CHUNK: usize = 8;

/// How the elements of a tile are divided into classes.
#[derive(Clone, Copy)]
pub struct Classes {
    pub kind: Kind,
    pub high: u8,
    pub count: u8,
}

/// The scan results for the blocks of a chunk.
#[repr(align(64))]
pub struct Chunk {
    /// Elements of each class in each block.
    pub masks: [[u64; MAX_CLASSES]; CHUNK],
    /// Elements of each class before each block, from the start of the tile; one row more than there are blocks.
    pub ranks: [[u32; MAX_CLASSES]; CHUNK + 1],
    /// Elements that changed.
    pub changed: [u64; CHUNK],
}

impl Chunk {
    pub fn new() -> Box<Self> {
        Box::new(Self { masks: [[0; MAX_CLASSES]; CHUNK], ranks: [[0; MAX_CLASSES]; CHUNK + 1], changed: [0; CHUNK] })
    }
}

/// The instruction level to use. Each is at least as fast as the one before, on machines that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Portable = 0,
    Avx2 = 1,
    Avx512 = 2,
}

impl Level {
    /// The best level of this machine.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("bmi1") && has!("bmi2") && has!("popcnt") && has!("lzcnt") {
                let wide = has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq");
                return if wide && has!("avx512vbmi") && has!("avx512vbmi2") && has!("avx512vpopcntdq") && has!("gfni") {
                    Level::Avx512
                } else {
                    Level::Avx2
                };
            }
        }
        Level::Portable
    }

    /// None for a level that this machine lacks.
    pub fn of(number: u32) -> Option<Self> {
        let level = [Level::Portable, Level::Avx2, Level::Avx512].get(number as usize).copied()?;
        (level <= Self::best()).then_some(level)
    }
}

/// The pass over full blocks, at one instruction level.
///
/// # Safety
/// The machine has the instructions of the level; `old` and `new` point to `count` * 64 readable codes.
pub trait Scan {
    /// Fill `chunk.changed[..count]`.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn changes<T: Code>(old: *const T, new: *const T, count: usize, chunk: &mut Chunk);

    /// Fill `chunk.masks[..count]` and `chunk.ranks[1..=count]`, continuing from `chunk.ranks[0]`.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn classes<T: Code>(old: *const T, count: usize, classes: Classes, chunk: &mut Chunk);

    /// Write the positions of the set bits of `masks`, in order, to `places`; returns their number. Entries after them
    /// may be overwritten.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn places(masks: &[u64], places: &mut Places) -> usize;

    /// The `n`th set bit of a mask, isolated; 0 if there is none.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn nth_bit(mask: u64, n: u32) -> u64;

    /// Bit `c` of the result: whether `numbers[c]` is below `limits[c]`.
    ///
    /// # Safety
    /// As for the trait.
    #[inline(always)]
    unsafe fn below(numbers: &[u32; MAX_CLASSES], limits: &[u32; MAX_CLASSES]) -> u32 {
        let all = numbers.iter().zip(limits).enumerate();
        all.fold(0, |set, (c, (number, limit))| set | ((number < limit) as u32) << c)
    }

    /// The result of `checksum::of_words`.
    ///
    /// # Safety
    /// As for `checksum::of_words`, and as for the trait.
    unsafe fn sums(words: *const u64, first: usize, count: usize) -> [u64; 2];

    /// Prefetch the cache line of an address. Any address is allowed.
    fn fetch<T>(_: *const T) {}
}

/// Room for the positions of a chunk, and for what a vector store writes after the last one.
pub type Places = [u16; CHUNK * BLOCK + BLOCK];

#[inline(always)]
fn places_one_by_one(masks: &[u64], places: &mut Places) -> usize {
    let mut count = 0;
    for (block, &mask) in masks.iter().enumerate() {
        let mut mask = mask;
        while mask != 0 {
            places[count] = (block * BLOCK) as u16 + mask.trailing_zeros() as u16;
            mask &= mask - 1;
            count += 1;
        }
    }
    count
}

pub struct Portable;

impl Scan for Portable {
    #[inline(always)]
    unsafe fn changes<T: Code>(old: *const T, new: *const T, count: usize, chunk: &mut Chunk) {
        for block in 0..count {
            let (a, b) = unsafe { (block_at(old, block), block_at(new, block)) };
            let mut differs = [0u8; BLOCK];
            for i in 0..BLOCK {
                differs[i] = (a[i] != b[i]) as u8;
            }
            chunk.changed[block] = plane(&differs, 0);
        }
    }

    #[inline(always)]
    unsafe fn classes<T: Code>(old: *const T, count: usize, classes: Classes, chunk: &mut Chunk) {
        for block in 0..count {
            let codes = unsafe { block_at(old, block) };
            let mut class = [0u8; BLOCK];
            for i in 0..BLOCK {
                class[i] = classes.kind.class(codes[i].widen(), classes.high, classes.count) as u8;
            }
            chunk.masks[block] = masks([0, 1, 2, 3].map(|bit| plane(&class, bit)), classes.count);
            for c in 0..classes.count as usize {
                chunk.ranks[block + 1][c] = chunk.ranks[block][c] + chunk.masks[block][c].count_ones();
            }
        }
    }

    #[inline(always)]
    unsafe fn places(masks: &[u64], places: &mut Places) -> usize {
        places_one_by_one(masks, places)
    }

    #[inline(always)]
    unsafe fn nth_bit(mut mask: u64, n: u32) -> u64 {
        for _ in 0..n {
            mask &= mask.wrapping_sub(1);
        }
        mask & mask.wrapping_neg()
    }

    #[inline(always)]
    unsafe fn sums(words: *const u64, first: usize, count: usize) -> [u64; 2] {
        unsafe { checksum::of_words(words, first, count) }
    }
}

#[inline(always)]
unsafe fn block_at<'a, T>(codes: *const T, block: usize) -> &'a [T; BLOCK] {
    unsafe { &*codes.add(block * BLOCK).cast() }
}

/// One bit of each of 64 bytes.
#[inline(always)]
fn plane(bytes: &[u8; BLOCK], bit: u32) -> u64 {
    let mut gathered = 0u64;
    for (i, eight) in bytes.as_chunks::<8>().0.iter().enumerate() {
        let low = u64::from_le_bytes(*eight) >> bit & 0x0101_0101_0101_0101;
        gathered |= (low.wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * i);
    }
    gathered
}

#[inline(always)]
fn masks(planes: [u64; 4], count: u8) -> [u64; MAX_CLASSES] {
    let mut masks = [0; MAX_CLASSES];
    for (c, mask) in masks.iter_mut().enumerate().take(count as usize) {
        *mask = (0..4).fold(u64::MAX, |m, bit| m & if c >> bit & 1 == 1 { planes[bit] } else { !planes[bit] });
    }
    masks
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    pub struct Avx2;

    impl Scan for Avx2 {
        #[inline(always)]
        unsafe fn changes<T: Code>(old: *const T, new: *const T, count: usize, chunk: &mut Chunk) {
            for block in 0..count {
                chunk.changed[block] = unsafe {
                    match T::BYTES {
                        1 => differs_8(old.cast::<u8>().add(64 * block), new.cast::<u8>().add(64 * block)),
                        2 => differs_16(old.cast::<u16>().add(64 * block), new.cast::<u16>().add(64 * block)),
                        _ => differs_32(old.cast::<u32>().add(64 * block), new.cast::<u32>().add(64 * block)),
                    }
                };
            }
        }

        #[inline(always)]
        unsafe fn classes<T: Code>(old: *const T, count: usize, classes: Classes, chunk: &mut Chunk) {
            for block in 0..count {
                let codes = unsafe { block_at(old, block) };
                let mut class = [0u8; BLOCK];
                for i in 0..BLOCK {
                    class[i] = classes.kind.class(codes[i].widen(), classes.high, classes.count) as u8;
                }
                let planes = unsafe { planes(&class) };
                chunk.masks[block] = masks(planes, classes.count);
                for c in 0..classes.count as usize {
                    chunk.ranks[block + 1][c] = chunk.ranks[block][c] + chunk.masks[block][c].count_ones();
                }
            }
        }

        #[inline(always)]
        unsafe fn places(masks: &[u64], places: &mut Places) -> usize {
            places_one_by_one(masks, places)
        }

        #[inline(always)]
        unsafe fn nth_bit(mask: u64, n: u32) -> u64 {
            unsafe { _pdep_u64(1 << n, mask) }
        }

        #[inline(always)]
        unsafe fn sums(words: *const u64, first: usize, count: usize) -> [u64; 2] {
            unsafe { checksum::x86::of_words_256(words, first, count) }
        }

        #[inline(always)]
        fn fetch<T>(at: *const T) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn planes(class: &[u8; BLOCK]) -> [u64; 4] {
        let half = |i: usize| unsafe { _mm256_loadu_si256(class.as_ptr().add(32 * i).cast()) };
        let (a, b) = (half(0), half(1));
        let both = |a, b| _mm256_movemask_epi8(a) as u32 as u64 | (_mm256_movemask_epi8(b) as u32 as u64) << 32;
        [
            both(_mm256_slli_epi16::<7>(a), _mm256_slli_epi16::<7>(b)),
            both(_mm256_slli_epi16::<6>(a), _mm256_slli_epi16::<6>(b)),
            both(_mm256_slli_epi16::<5>(a), _mm256_slli_epi16::<5>(b)),
            both(_mm256_slli_epi16::<4>(a), _mm256_slli_epi16::<4>(b)),
        ]
    }

    #[target_feature(enable = "avx2")]
    unsafe fn differs_8(old: *const u8, new: *const u8) -> u64 {
        let half = |i: usize| unsafe {
            let (a, b) = (_mm256_loadu_si256(old.add(32 * i).cast()), _mm256_loadu_si256(new.add(32 * i).cast()));
            !(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)) as u32) as u64
        };
        half(0) | half(1) << 32
    }

    #[target_feature(enable = "avx2")]
    unsafe fn differs_16(old: *const u16, new: *const u16) -> u64 {
        let half = |i: usize| unsafe {
            let same = |j: usize| {
                let at = 32 * i + 16 * j;
                let (a, b) = (_mm256_loadu_si256(old.add(at).cast()), _mm256_loadu_si256(new.add(at).cast()));
                _mm256_cmpeq_epi16(a, b)
            };
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(same(0), same(1)));
            !(_mm256_movemask_epi8(packed) as u32) as u64
        };
        half(0) | half(1) << 32
    }

    #[target_feature(enable = "avx2")]
    unsafe fn differs_32(old: *const u32, new: *const u32) -> u64 {
        let eighth = |i: usize| unsafe {
            let (a, b) = (_mm256_loadu_si256(old.add(8 * i).cast()), _mm256_loadu_si256(new.add(8 * i).cast()));
            !(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b))) as u64) & 0xFF
        };
        (0..8).fold(0, |mask, i| mask | eighth(i) << (8 * i))
    }

    pub struct Avx512;

    impl Scan for Avx512 {
        #[inline(always)]
        unsafe fn changes<T: Code>(old: *const T, new: *const T, count: usize, chunk: &mut Chunk) {
            unsafe { changes_512(old, new, count, chunk) }
        }

        #[inline(always)]
        unsafe fn classes<T: Code>(old: *const T, count: usize, classes: Classes, chunk: &mut Chunk) {
            unsafe { classes_512(old, count, classes, chunk) }
        }

        #[inline(always)]
        unsafe fn places(masks: &[u64], places: &mut Places) -> usize {
            unsafe { places_512(masks, places) }
        }

        #[inline(always)]
        unsafe fn nth_bit(mask: u64, n: u32) -> u64 {
            unsafe { _pdep_u64(1 << n, mask) }
        }

        #[inline(always)]
        unsafe fn sums(words: *const u64, first: usize, count: usize) -> [u64; 2] {
            unsafe { checksum::x86::of_words_512(words, first, count) }
        }

        #[inline(always)]
        unsafe fn below(numbers: &[u32; MAX_CLASSES], limits: &[u32; MAX_CLASSES]) -> u32 {
            unsafe { below_512(numbers, limits) }
        }

        #[inline(always)]
        fn fetch<T>(at: *const T) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
    unsafe fn changes_512<T: Code>(old: *const T, new: *const T, count: usize, chunk: &mut Chunk) {
        for block in 0..count {
            let at = |p: *const T, i: usize| unsafe {
                _mm512_loadu_si512(p.cast::<u8>().add(BLOCK * T::BYTES * block + 64 * i).cast())
            };
            chunk.changed[block] = match T::BYTES {
                1 => _mm512_cmpneq_epi8_mask(at(old, 0), at(new, 0)),
                2 => (0..2).fold(0, |m, i| m | (_mm512_cmpneq_epi16_mask(at(old, i), at(new, i)) as u64) << (32 * i)),
                _ => (0..4).fold(0, |m, i| m | (_mm512_cmpneq_epi32_mask(at(old, i), at(new, i)) as u64) << (16 * i)),
            };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
    unsafe fn classes_512<T: Code>(old: *const T, count: usize, classes: Classes, chunk: &mut Chunk) {
        let shift = _mm_cvtsi32_si128(classes.kind.shift as i32);
        let exponent = _mm512_set1_epi8(classes.kind.exponent_mask as i8);
        let high = _mm512_set1_epi8(classes.high as i8);
        let last = _mm512_set1_epi8(classes.count as i8 - 1);
        let evens = bytes(|i| 2 * i);
        // lane c of `unset[b]`: all ones where bit b of the class index c (0 to 7) is 0
        let unset = [0, 1, 2].map(|bit| lanes(|c| if c >> bit & 1 == 1 { 0 } else { u64::MAX }));
        let diagonal = _mm512_set1_epi64(0x8040_2010_0804_0201u64 as i64);
        let transposed = bytes(|i| i % 8 * 8 + i / 8);
        let even_words = words(|i| 2 * i);
        let mut ranks = unsafe { _mm512_loadu_si512(chunk.ranks[0].as_ptr().cast()) };
        for block in 0..count {
            let at = |i: usize| unsafe {
                _mm512_loadu_si512(old.cast::<u8>().add(BLOCK * T::BYTES * block + 64 * i).cast())
            };
            let shifted = match T::BYTES {
                1 => _mm512_srl_epi16(at(0), shift),
                2 => _mm512_permutex2var_epi8(_mm512_srl_epi16(at(0), shift), evens, _mm512_srl_epi16(at(1), shift)),
                _ => {
                    let quarter = |i| _mm512_cvtepi32_epi8(_mm512_srl_epi32(at(i), shift));
                    let halves = [0, 2].map(|i| _mm256_set_m128i(quarter(i + 1), quarter(i)));
                    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves[0]), halves[1])
                }
            };
            let class = _mm512_min_epu8(_mm512_subs_epu8(high, _mm512_and_si512(shifted, exponent)), last);
            // byte b of quadword i: bit b of elements 8i + 7 to 8i; the same upwards; quadword b: bit b of all elements
            let downwards = _mm512_gf2p8affine_epi64_epi8::<0>(diagonal, class);
            let upwards = _mm512_gf2p8affine_epi64_epi8::<0>(downwards, diagonal);
            let planes = _mm512_permutexvar_epi8(transposed, upwards);
            let plane = |bit: i64| _mm512_permutexvar_epi64(_mm512_set1_epi64(bit), planes);
            let low = _mm512_ternarylogic_epi64::<0x80>(
                _mm512_xor_si512(plane(0), unset[0]),
                _mm512_xor_si512(plane(1), unset[1]),
                _mm512_xor_si512(plane(2), unset[2]),
            );
            let eighth = plane(3);
            let masks = [_mm512_andnot_si512(eighth, low), _mm512_and_si512(eighth, low)];
            let counts = masks.map(|masks| _mm512_popcnt_epi64(masks));
            ranks = _mm512_add_epi32(ranks, _mm512_permutex2var_epi32(counts[0], even_words, counts[1]));
            unsafe {
                for (half, masks) in masks.into_iter().enumerate() {
                    _mm512_storeu_si512(chunk.masks[block].as_mut_ptr().add(8 * half).cast(), masks);
                }
                _mm512_storeu_si512(chunk.ranks[block + 1].as_mut_ptr().cast(), ranks);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
    unsafe fn places_512(masks: &[u64], places: &mut Places) -> usize {
        let all = bytes(|i| i);
        let start = places.as_mut_ptr();
        let places_at = |at: usize| start.wrapping_add(at);
        let mut base = _mm512_setzero_si512();
        let mut count = 0;
        for &mask in masks {
            let chosen = _mm512_maskz_compress_epi8(mask, all);
            let put = |at: usize, half: __m256i| unsafe {
                let places = _mm512_add_epi16(_mm512_cvtepu8_epi16(half), base);
                _mm512_storeu_si512(places_at(at).cast(), places);
            };
            put(count, _mm512_castsi512_si256(chosen));
            let some = mask.count_ones() as usize;
            if some > 32 {
                put(count + 32, _mm512_extracti64x4_epi64::<1>(chosen));
            }
            count += some;
            base = _mm512_add_epi16(base, _mm512_set1_epi16(BLOCK as i16));
        }
        count
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn below_512(numbers: &[u32; MAX_CLASSES], limits: &[u32; MAX_CLASSES]) -> u32 {
        let [numbers, limits] = [numbers, limits].map(|all| unsafe { _mm512_loadu_si512(all.as_ptr().cast()) });
        _mm512_cmplt_epu32_mask(numbers, limits) as u32
    }

    #[target_feature(enable = "avx512f")]
    fn bytes(value: impl Fn(u8) -> u8) -> __m512i {
        let bytes: [u8; 64] = std::array::from_fn(|i| value(i as u8));
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f")]
    fn words(value: impl Fn(u32) -> u32) -> __m512i {
        let words: [u32; 16] = std::array::from_fn(|i| value(i as u32));
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f")]
    fn lanes(value: impl Fn(u64) -> u64) -> __m512i {
        let words: [u64; 8] = std::array::from_fn(|i| value(i as u64));
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both<S: Scan, T: Code>(kind: Kind, make: fn(u32) -> T) {
        let mut state = 12345u32;
        let mut random = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            state >> 3 ^ state << 11
        };
        let old: Vec<T> = (0..5 * BLOCK).map(|_| make(random())).collect();
        let new: Vec<T> = old.iter().map(|&c| if random() % 3 == 0 { make(random()) } else { c }).collect();
        for (high, count) in [(130, 16), (120, 3), (8, 16), (0, 1)] {
            let classes = Classes { kind, high, count };
            let (mut a, mut b) = (Chunk::new(), Chunk::new());
            unsafe {
                Portable::changes(old.as_ptr(), new.as_ptr(), 5, &mut a);
                Portable::classes(old.as_ptr(), 5, classes, &mut a);
                S::changes(old.as_ptr(), new.as_ptr(), 5, &mut b);
                S::classes(old.as_ptr(), 5, classes, &mut b);
            }
            for c in 0..count as usize {
                for block in 0..5 {
                    assert_eq!(a.changed[block], b.changed[block]);
                    assert_eq!(a.masks[block][c], b.masks[block][c]);
                    assert_eq!(a.ranks[block + 1][c], b.ranks[block + 1][c]);
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_level_gives_the_portable_masks() {
        fn all<S: Scan>() {
            both::<S, u8>(Kind::new(8, 3, 15).unwrap(), |v| v as u8);
            both::<S, u16>(Kind::new(16, 7, 255).unwrap(), |v| v as u16);
            both::<S, u16>(Kind::new(16, 10, 31).unwrap(), |v| v as u16);
            both::<S, u32>(Kind::new(32, 23, 255).unwrap(), |v| v);
        }
        if Level::best() >= Level::Avx2 {
            all::<Avx2>();
        }
        if Level::best() >= Level::Avx512 {
            all::<Avx512>();
        }
    }
}
