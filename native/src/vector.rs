//! Vectors of float32 numbers, with AVX2 and with AVX-512: what the kernels of few rows need of them.
//!
//! Kernels are generic over a vector and inlined into one function for each instruction set. Both sets round alike, so a
//! kernel whose sums have a prescribed order has the same bits with both.
#![allow(clippy::missing_safety_doc)] // of each method: the safety of `Vector`

/// Sizes that the kernels support are multiples of this: a whole number of vectors of either kind.
pub const LANES: usize = 16;

/// An instruction set with vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Set {
    Avx512,
    Avx2,
}

impl Set {
    /// The sets that this machine has, the best one first.
    pub fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let (wide, half) = {
            use std::arch::is_x86_feature_detected as has;
            (has!("avx512f"), has!("avx2") && has!("fma"))
        };
        #[cfg(not(target_arch = "x86_64"))]
        let (wide, half) = (false, false);
        [wide.then_some(Set::Avx512), half.then_some(Set::Avx2)].into_iter().flatten()
    }

    pub fn best() -> Option<Self> {
        Self::available().next()
    }
}

/// Define a function (set, request) that calls `$kernel`, generic over a vector, compiled for that set. It returns what the
/// kernel does.
macro_rules! compiled {
    ($name:ident, $kernel:ident, $request:ty) => {
        /// # Safety
        /// As for the kernel; the machine has the set.
        unsafe fn $name(set: $crate::vector::Set, request: &$request) -> bool {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{__m256, __m512};
                #[target_feature(enable = "avx512f")]
                unsafe fn wide(request: &$request) -> bool {
                    unsafe { $kernel::<__m512>(request) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn half(request: &$request) -> bool {
                    unsafe { $kernel::<__m256>(request) }
                }
                match set {
                    $crate::vector::Set::Avx512 => unsafe { wide(request) },
                    $crate::vector::Set::Avx2 => unsafe { half(request) },
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            {
                let _ = (set, request);
                false
            }
        }
    };
}
pub(crate) use compiled;

/// Some numbers side by side in a register.
///
/// # Safety
/// The machine has the instructions; addresses are of as many numbers as the function reads or writes.
pub trait Vector: Copy {
    const LANES: usize;
    /// Rows and vectors of outputs whose sums fit into the registers, beside what they are summed from.
    const ROWS: usize;
    /// The same for sums along vectors, of four outputs.
    const DOT_ROWS: usize;

    unsafe fn all(number: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn plus(self, other: Self) -> Self;
    unsafe fn minus(self, other: Self) -> Self;
    unsafe fn times(self, other: Self) -> Self;
    unsafe fn over(self, other: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    /// self · factor + other, rounded once.
    unsafe fn times_plus(self, factor: Self, other: Self) -> Self;
    /// The whole number that is nearest.
    unsafe fn rounded(self) -> Self;
    /// self · 2^whole, in two steps, so that neither factor is infinite where the product is finite.
    unsafe fn times_power(self, whole: Self) -> Self;
    /// `value` where `number` is below `limit`, else self.
    unsafe fn where_below(self, number: Self, limit: Self, value: Self) -> Self;
    /// The first `count` numbers of self, and the others of `other`.
    unsafe fn first(self, count: usize, other: Self) -> Self;
    unsafe fn sum(self) -> f32;
    unsafe fn highest(self) -> f32;
    /// Write the sums of four vectors.
    unsafe fn store_sums(four: [Self; 4], to: *mut f32);
    /// Transpose `LANES` rows of `LANES` numbers. `stride`, `step`: the distance between two rows there, and here.
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, step: usize);

    /// Sleef's `expf_u10`.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        unsafe {
            let whole = self.times(Self::all(std::f32::consts::LOG2_E)).rounded();
            let s = whole.times_plus(Self::all(-0.693_145_75), self);
            let s = whole.times_plus(Self::all(-1.428_606_8e-6), s);
            let mut u = Self::all(0.000_198_527_62);
            for c in [0.001_393_043_6, 0.008_333_361, 0.041_666_485, 0.166_666_67, 0.5] {
                u = u.times_plus(s, Self::all(c));
            }
            let u = Self::all(1.0).plus(s.times(s).times_plus(u, s)).times_power(whole);
            let u = u.where_below(self, Self::all(-104.0), Self::all(0.0));
            u.where_below(Self::all(100.0), self, Self::all(f32::INFINITY))
        }
    }
}

/// Fetch the cache line of an address into all caches. Any address is allowed.
#[inline(always)]
pub fn fetch(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::*;
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    #[inline(always)]
    unsafe fn store_four_sums([a, b, c, d]: [__m256; 4], to: *mut f32) {
        unsafe {
            let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
            _mm_storeu_ps(to, sums);
        }
    }

    impl Vector for __m256 {
        const LANES: usize = 8;
        const ROWS: usize = 6;
        const DOT_ROWS: usize = 3;

        #[inline(always)]
        unsafe fn all(number: f32) -> Self {
            unsafe { _mm256_set1_ps(number) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm256_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            unsafe { _mm256_add_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn minus(self, other: Self) -> Self {
            unsafe { _mm256_sub_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            unsafe { _mm256_mul_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn over(self, other: Self) -> Self {
            unsafe { _mm256_div_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            unsafe { _mm256_max_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn times_plus(self, factor: Self, other: Self) -> Self {
            unsafe { _mm256_fmadd_ps(self, factor, other) }
        }
        #[inline(always)]
        unsafe fn rounded(self) -> Self {
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtps_epi32(self)) }
        }
        #[inline(always)]
        unsafe fn times_power(self, whole: Self) -> Self {
            unsafe {
                let q = _mm256_cvtps_epi32(whole);
                let half = _mm256_srai_epi32::<1>(q);
                let [a, b] = [half, _mm256_sub_epi32(q, half)]
                    .map(|q| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(q, _mm256_set1_epi32(127)))));
                _mm256_mul_ps(_mm256_mul_ps(self, a), b)
            }
        }
        #[inline(always)]
        unsafe fn where_below(self, number: Self, limit: Self, value: Self) -> Self {
            unsafe { _mm256_blendv_ps(self, value, _mm256_cmp_ps::<_CMP_LT_OQ>(number, limit)) }
        }
        #[inline(always)]
        unsafe fn first(self, count: usize, other: Self) -> Self {
            unsafe {
                let places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(count.min(Self::LANES) as i32), places);
                _mm256_blendv_ps(other, self, _mm256_castsi256_ps(kept))
            }
        }
        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            let mut four = [0.0; 4];
            unsafe { store_four_sums([self; 4], four.as_mut_ptr()) };
            four[0]
        }
        #[inline(always)]
        unsafe fn highest(self) -> f32 {
            let mut numbers = [0.0f32; 8];
            unsafe { self.store(numbers.as_mut_ptr()) };
            numbers.into_iter().fold(f32::NEG_INFINITY, f32::max)
        }
        #[inline(always)]
        unsafe fn store_sums(four: [Self; 4], to: *mut f32) {
            unsafe { store_four_sums(four, to) }
        }
        #[inline(always)]
        unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, step: usize) {
            unsafe {
                let zero = _mm256_setzero_ps();
                let mut r = [zero; 8]; // the left halves of rows i and i + 4, then the right halves
                for i in 0..4 {
                    let (low, high) = (from.wrapping_add(i * stride), from.wrapping_add((i + 4) * stride));
                    for right in 0..2 {
                        let a = _mm256_castps128_ps256(_mm_loadu_ps(low.add(4 * right)));
                        r[4 * right + i] = _mm256_insertf128_ps::<1>(a, _mm_loadu_ps(high.add(4 * right)));
                    }
                }
                for right in 0..2 {
                    let [a, b, c, d] = [r[4 * right], r[4 * right + 1], r[4 * right + 2], r[4 * right + 3]];
                    let [ab, cd] = [_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d)];
                    let [ef, gh] = [_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d)];
                    let columns = [
                        _mm256_shuffle_ps::<0x44>(ab, cd),
                        _mm256_shuffle_ps::<0xee>(ab, cd),
                        _mm256_shuffle_ps::<0x44>(ef, gh),
                        _mm256_shuffle_ps::<0xee>(ef, gh),
                    ];
                    for (i, column) in columns.into_iter().enumerate() {
                        column.store(to.wrapping_add((4 * right + i) * step));
                    }
                }
            }
        }
    }

    impl Vector for __m512 {
        const LANES: usize = 16;
        const ROWS: usize = 8;
        const DOT_ROWS: usize = 5;

        #[inline(always)]
        unsafe fn all(number: f32) -> Self {
            unsafe { _mm512_set1_ps(number) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            unsafe { _mm512_add_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn minus(self, other: Self) -> Self {
            unsafe { _mm512_sub_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            unsafe { _mm512_mul_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn over(self, other: Self) -> Self {
            unsafe { _mm512_div_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            unsafe { _mm512_max_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn times_plus(self, factor: Self, other: Self) -> Self {
            unsafe { _mm512_fmadd_ps(self, factor, other) }
        }
        #[inline(always)]
        unsafe fn rounded(self) -> Self {
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtps_epi32(self)) }
        }
        #[inline(always)]
        unsafe fn times_power(self, whole: Self) -> Self {
            unsafe {
                let q = _mm512_cvtps_epi32(whole);
                let half = _mm512_srai_epi32::<1>(q);
                let [a, b] = [half, _mm512_sub_epi32(q, half)]
                    .map(|q| _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(q, _mm512_set1_epi32(127)))));
                _mm512_mul_ps(_mm512_mul_ps(self, a), b)
            }
        }
        #[inline(always)]
        unsafe fn where_below(self, number: Self, limit: Self, value: Self) -> Self {
            unsafe { _mm512_mask_mov_ps(self, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(number, limit), value) }
        }
        #[inline(always)]
        unsafe fn first(self, count: usize, other: Self) -> Self {
            let kept = if count >= Self::LANES { !0 } else { !(!0u16 << count) };
            unsafe { _mm512_mask_mov_ps(other, kept, self) }
        }
        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe { _mm512_reduce_add_ps(self) }
        }
        #[inline(always)]
        unsafe fn highest(self) -> f32 {
            unsafe { _mm512_reduce_max_ps(self) }
        }
        #[inline(always)]
        unsafe fn store_sums(four: [Self; 4], to: *mut f32) {
            unsafe {
                let halves = four.map(|v| {
                    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
                    _mm256_add_ps(_mm512_castps512_ps256(v), high)
                });
                store_four_sums(halves, to);
            }
        }
        #[inline(always)]
        unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, step: usize) {
            unsafe {
                let zero = _mm512_setzero_ps();
                let (mut r, mut pairs, mut fours) = ([zero; 16], [zero; 16], [zero; 16]);
                for (i, row) in r.iter_mut().enumerate() {
                    *row = _mm512_loadu_ps(from.wrapping_add(i * stride));
                }
                for i in 0..8 {
                    pairs[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                    pairs[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
                }
                for i in (0..16).step_by(4) {
                    for j in 0..2 {
                        let (a, b) = (_mm512_castps_pd(pairs[i + j]), _mm512_castps_pd(pairs[i + j + 2]));
                        fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                        fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                    }
                }
                for j in 0..4 {
                    let even = _mm512_shuffle_f32x4::<0x88>(fours[j], fours[4 + j]);
                    let even_after = _mm512_shuffle_f32x4::<0x88>(fours[8 + j], fours[12 + j]);
                    let odd = _mm512_shuffle_f32x4::<0xdd>(fours[j], fours[4 + j]);
                    let odd_after = _mm512_shuffle_f32x4::<0xdd>(fours[8 + j], fours[12 + j]);
                    for (i, column) in [
                        (j, _mm512_shuffle_f32x4::<0x88>(even, even_after)),
                        (8 + j, _mm512_shuffle_f32x4::<0xdd>(even, even_after)),
                        (4 + j, _mm512_shuffle_f32x4::<0x88>(odd, odd_after)),
                        (12 + j, _mm512_shuffle_f32x4::<0xdd>(odd, odd_after)),
                    ] {
                        column.store(to.wrapping_add(i * step));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
pub mod plain {
    use super::Vector;
    use std::array::from_fn;

    /// Sixteen numbers without vector instructions, to test on any machine the kernels with vectors as wide as AVX-512's.
    #[derive(Clone, Copy)]
    pub struct Plain([f32; 16]);

    impl Plain {
        fn with(self, other: Self, operator: impl Fn(f32, f32) -> f32) -> Self {
            Plain(from_fn(|i| operator(self.0[i], other.0[i])))
        }
    }

    impl Vector for Plain {
        const LANES: usize = 16;
        const ROWS: usize = 8;
        const DOT_ROWS: usize = 5;

        unsafe fn all(number: f32) -> Self {
            Plain([number; 16])
        }
        unsafe fn load(from: *const f32) -> Self {
            Plain(unsafe { from.cast::<[f32; 16]>().read() })
        }
        unsafe fn store(self, to: *mut f32) {
            unsafe { to.cast::<[f32; 16]>().write(self.0) }
        }
        unsafe fn plus(self, other: Self) -> Self {
            self.with(other, |a, b| a + b)
        }
        unsafe fn minus(self, other: Self) -> Self {
            self.with(other, |a, b| a - b)
        }
        unsafe fn times(self, other: Self) -> Self {
            self.with(other, |a, b| a * b)
        }
        unsafe fn over(self, other: Self) -> Self {
            self.with(other, |a, b| a / b)
        }
        unsafe fn max(self, other: Self) -> Self {
            self.with(other, f32::max)
        }
        unsafe fn times_plus(self, factor: Self, other: Self) -> Self {
            Plain(from_fn(|i| self.0[i].mul_add(factor.0[i], other.0[i])))
        }
        unsafe fn rounded(self) -> Self {
            Plain(self.0.map(f32::round_ties_even))
        }
        unsafe fn times_power(self, whole: Self) -> Self {
            let power = |exponent: i32| f32::from_bits(((exponent + 127) << 23) as u32);
            self.with(whole, |number, whole| {
                let half = whole as i32 >> 1;
                number * power(half) * power(whole as i32 - half)
            })
        }
        unsafe fn where_below(self, number: Self, limit: Self, value: Self) -> Self {
            Plain(from_fn(|i| if number.0[i] < limit.0[i] { value.0[i] } else { self.0[i] }))
        }
        unsafe fn first(self, count: usize, other: Self) -> Self {
            Plain(from_fn(|i| if i < count { self.0[i] } else { other.0[i] }))
        }
        unsafe fn sum(self) -> f32 {
            self.0.iter().sum()
        }
        unsafe fn highest(self) -> f32 {
            self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
        }
        unsafe fn store_sums(four: [Self; 4], to: *mut f32) {
            unsafe { to.cast::<[f32; 4]>().write(from_fn(|i| four[i].sum())) }
        }
        unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, step: usize) {
            for (row, column) in (0..16).flat_map(|row| (0..16).map(move |column| (row, column))) {
                unsafe { to.add(column * step + row).write(*from.add(row * stride + column)) };
            }
        }
    }
}
