//! Products of few rows with weights, in the order of summation of a vendor's GEMM that cuts the inner width into blocks.
//!
//! Such a GEMM turns all weights into another layout before it multiplies, which costs several times as much as the
//! product of a few rows. Here 32 outputs at a time are turned in registers, into a panel that stays in the first cache.
//! Within a block each sum is one chain of fused multiply-adds from 0; blocks are added in order. So the bits of a row
//! depend on that row and the weights alone, and the caller can measure whether they are the vendor's.

/// Largest number of inputs of a block: a panel of 32 outputs then has 24 KiB.
pub const MAX_BLOCK: usize = 192;
/// Numbers of a vector.
pub const LANES: usize = 16;

/// Rows `x`, sorted by group, and a matrix for each group: `out` = x · weightᵀ for the rows of each group.
///
/// `rows`: the number of rows of each group. `row_stride`, `group_stride`: the distance in numbers between two outputs
/// of a matrix, and between two matrices. Rows of `x` and `out` are contiguous.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawProduct {
    pub x: *const f32,
    pub weights: *const f32,
    pub out: *mut f32,
    pub rows: *const u64,
    pub num_groups: u64,
    pub in_size: u64,
    pub out_size: u64,
    pub row_stride: u64,
    pub group_stride: u64,
    pub block: u64,
}

/// Compute all products on this thread. Returns false, and writes nothing, where the machine has no AVX-512, or a size is
/// no multiple of the vector's, or the block too large.
///
/// # Safety
/// The product describes existing memory, and `out` is not read or written by others.
pub unsafe fn products(product: &RawProduct) -> bool {
    let (inner, outer, block) = (product.in_size as usize, product.out_size as usize, product.block as usize);
    let whole = inner.is_multiple_of(LANES) && outer.is_multiple_of(LANES) && block.is_multiple_of(LANES);
    if !whole || block == 0 || block > MAX_BLOCK {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        unsafe { avx512::products(product) };
        return true;
    }
    false
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512 {
    use super::{LANES, MAX_BLOCK, RawProduct};
    use std::arch::x86_64::*;

    /// Most rows whose sums are in registers.
    const MOST_ROWS: usize = 8;
    const WIDTH: usize = 2 * LANES;

    /// Weights of 32 outputs, the outputs of one input side by side.
    #[repr(align(64))]
    pub struct Panel([f32; MAX_BLOCK * WIDTH]);

    impl Panel {
        pub fn new() -> Self {
            Panel([0.0; MAX_BLOCK * WIDTH])
        }

        /// The rows of a group, to be multiplied by `P` · 16 outputs of this panel.
        fn turned<const P: usize>(&self, group: Group) -> (Group, usize) {
            (Group { weight: self.0.as_ptr(), ..group }, P * LANES)
        }
    }

    /// Rows of one group.
    #[derive(Clone, Copy)]
    pub struct Group {
        pub x: *const f32,
        pub weight: *const f32,
        pub out: *mut f32,
        pub rows: usize,
    }

    /// Widths in and out of a matrix, the inputs in one chain of sums, and the distance between two outputs.
    #[derive(Clone, Copy)]
    pub struct Sizes {
        pub inner: usize,
        pub outer: usize,
        pub block: usize,
        pub stride: usize,
    }

    #[target_feature(enable = "avx512f")]
    pub unsafe fn products(product: &RawProduct) {
        let mut panel = Panel::new();
        let sizes = Sizes {
            inner: product.in_size as usize,
            outer: product.out_size as usize,
            block: product.block as usize,
            stride: product.row_stride as usize,
        };
        let mut before = 0;
        for number in 0..product.num_groups as usize {
            let rows = unsafe { *product.rows.add(number) } as usize;
            let group = Group {
                x: product.x.wrapping_add(before * sizes.inner),
                weight: product.weights.wrapping_add(number * product.group_stride as usize),
                out: product.out.wrapping_add(before * sizes.outer),
                rows,
            };
            if rows > 0 {
                unsafe { one(sizes, group, &mut panel) };
            }
            before += rows;
        }
    }

    /// Multiply the rows of a group by its matrix. Rows of `x` and `out` are contiguous.
    ///
    /// # Safety
    /// All sizes are multiples of `LANES`, the block is at most `MAX_BLOCK`, and the memory is there.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn one(sizes: Sizes, group: Group, panel: &mut Panel) {
        let Sizes { inner, outer, block, stride } = sizes;
        for output in (0..outer).step_by(WIDTH) {
            for input in (0..inner).step_by(block) {
                let (len, from) = (block.min(inner - input), group.weight.wrapping_add(output * stride + input));
                let part = Group { x: group.x.wrapping_add(input), out: group.out.wrapping_add(output), ..group };
                let start = input == 0;
                unsafe {
                    if outer - output >= WIDTH {
                        turn::<2>(from, stride, len, panel);
                        all_rows::<2>(panel.turned::<2>(part), (inner, outer), len, start);
                    } else {
                        turn::<1>(from, stride, len, panel);
                        all_rows::<1>(panel.turned::<1>(part), (inner, outer), len, start);
                    }
                }
            }
        }
    }

    /// Write `P` · 16 outputs of `len` inputs into the panel, the outputs of one input side by side.
    #[target_feature(enable = "avx512f")]
    unsafe fn turn<const P: usize>(from: *const f32, stride: usize, len: usize, panel: &mut Panel) {
        let to = panel.0.as_mut_ptr();
        for part in 0..P {
            for k in (0..len).step_by(LANES) {
                let square = from.wrapping_add(part * LANES * stride + k);
                let mut r = [_mm512_setzero_ps(); LANES];
                for (i, row) in r.iter_mut().enumerate() {
                    let at = square.wrapping_add(i * stride);
                    *row = unsafe {
                        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(P * LANES * stride).cast());
                        _mm512_loadu_ps(at)
                    };
                }
                for (i, column) in transposed(r).into_iter().enumerate() {
                    unsafe { _mm512_store_ps(to.add(((k + i) * P + part) * LANES), column) };
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    fn transposed(r: [__m512; 16]) -> [__m512; 16] {
        let zero = _mm512_setzero_ps();
        let (mut pairs, mut fours, mut out) = ([zero; 16], [zero; 16], [zero; 16]);
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
            out[j] = _mm512_shuffle_f32x4::<0x88>(even, even_after);
            out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even, even_after);
            out[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd, odd_after);
            out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd, odd_after);
        }
        out
    }

    /// Multiply all rows of a group by `P` · 16 outputs of `len` inputs, in groups of nearly equal size. Weights are
    /// side by side for one input, and `step` apart for two.
    ///
    /// # Safety
    /// The memory is there. `inner` and `outer` are the distances between two rows of `x`, and of `out`.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn all_rows<const P: usize>(
        (group, step): (Group, usize),
        sizes: (usize, usize),
        len: usize,
        start: bool,
    ) {
        let mut done = 0;
        while done < group.rows {
            let left = group.rows - done;
            let rows = left.div_ceil(left.div_ceil(MOST_ROWS));
            let (x, out) = (group.x.wrapping_add(done * sizes.0), group.out.wrapping_add(done * sizes.1));
            let part = Group { x, out, ..group };
            unsafe {
                match rows {
                    1 => some_rows::<1, P>(part, step, sizes, len, start),
                    2 => some_rows::<2, P>(part, step, sizes, len, start),
                    3 => some_rows::<3, P>(part, step, sizes, len, start),
                    4 => some_rows::<4, P>(part, step, sizes, len, start),
                    5 => some_rows::<5, P>(part, step, sizes, len, start),
                    6 => some_rows::<6, P>(part, step, sizes, len, start),
                    7 => some_rows::<7, P>(part, step, sizes, len, start),
                    _ => some_rows::<MOST_ROWS, P>(part, step, sizes, len, start),
                }
            }
            done += rows;
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn some_rows<const R: usize, const P: usize>(
        group: Group,
        step: usize,
        (inner, outer): (usize, usize),
        len: usize,
        start: bool,
    ) {
        let mut sums = [[_mm512_setzero_ps(); P]; R];
        for k in 0..len {
            let mut w = [_mm512_setzero_ps(); P];
            for (p, w) in w.iter_mut().enumerate() {
                *w = unsafe { _mm512_loadu_ps(group.weight.add(k * step + p * LANES)) };
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let one = _mm512_set1_ps(unsafe { *group.x.add(r * inner + k) });
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = _mm512_fmadd_ps(one, w, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                let at = group.out.wrapping_add(r * outer + p * LANES);
                let all = if start { sum } else { _mm512_add_ps(unsafe { _mm512_loadu_ps(at) }, sum) };
                unsafe { _mm512_storeu_ps(at, all) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn chains(x: &[f32], w: &[f32], block: usize) -> f32 {
        let chain = |(a, b): (&[f32], &[f32])| a.iter().zip(b).fold(0.0f32, |sum, (&a, &b)| a.mul_add(b, sum));
        x.chunks(block).zip(w.chunks(block)).map(chain).reduce(|a, b| a + b).unwrap()
    }

    #[test]
    fn each_number_is_a_sum_of_chains() {
        let (inner, outer, gap, block) = (208, 48, 16, 96);
        let rows = [3u64, 0, 1, 21];
        let count = rows.iter().sum::<u64>() as usize;
        let (x, w) = (numbers(count * inner, 1), numbers(rows.len() * outer * (inner + gap), 2));
        let mut out = vec![9.0f32; count * outer];
        let product = RawProduct {
            x: x.as_ptr(),
            weights: w.as_ptr(),
            out: out.as_mut_ptr(),
            rows: rows.as_ptr(),
            num_groups: rows.len() as u64,
            in_size: inner as u64,
            out_size: outer as u64,
            row_stride: (inner + gap) as u64,
            group_stride: (outer * (inner + gap)) as u64,
            block: block as u64,
        };
        if !unsafe { products(&product) } {
            return; // a machine without AVX-512
        }
        let groups = rows.iter().enumerate().flat_map(|(group, &rows)| (0..rows).map(move |_| group));
        for (row, group) in groups.enumerate() {
            for output in 0..outer {
                let (x, from) = (&x[row * inner..][..inner], (group * outer + output) * (inner + gap));
                assert_eq!(out[row * outer + output].to_bits(), chains(x, &w[from..][..inner], block).to_bits());
            }
        }
        assert!(!unsafe { products(&RawProduct { in_size: 200, ..product }) });
        assert!(!unsafe { products(&RawProduct { block: 208, ..product }) });
    }
}
