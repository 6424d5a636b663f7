//! Products of few rows with weights.
//!
//! A vendor's GEMM turns all weights into another layout before it multiplies, which costs several times as much as the
//! product of a few rows. There are two ways here:
//!
//! - In the order of summation of a GEMM that cuts the inner width into blocks: 32 outputs at a time are transposed in
//!   registers, into a panel that stays in the L1 cache. Within a block each sum is one chain of fused multiply-adds from
//!   0; blocks are added in order. So the bits of a row depend on that row and the weights alone, and the caller can measure
//!   whether they are the vendor's.
//! - In the fastest order: up to `MOST_DOTS` rows, sums along vectors of inputs. Four outputs are read at a time, from
//!   memory once for all rows and as they lie there, while the next four are prefetched. For more rows, panels.

use crate::vector::{LANES, Set, Vector, compiled, fetch};
use std::mem::MaybeUninit;

/// Largest number of inputs of a block: a panel of 32 outputs then has 24 KiB.
pub const MAX_BLOCK: usize = 192;
/// A value for `block`: sums in the fastest order.
pub const ANY_ORDER: usize = 0;
/// Outputs of a panel.
const WIDTH: usize = 2 * LANES;
/// Most rows that are multiplied without a panel in the fastest order.
const MOST_DOTS: usize = 64;

/// Rows `x`, sorted by group, and a matrix for each group: `out` = x · weightᵀ for the rows of each group.
///
/// `rows`: the number of rows of each group. `row_stride`, `group_stride`: the distance in numbers between two outputs
/// of a matrix, and between two matrices. Rows of `x` and `out` are contiguous. `block`: the inputs in one chain of sums, or
/// `ANY_ORDER`.
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

/// Compute all products on this thread. Returns false, and writes nothing, where the machine has neither AVX-512 nor
/// AVX2, or a size is no multiple of `LANES`, or the block is too large.
///
/// # Safety
/// The product describes existing memory, and `out` is not read or written by others.
pub unsafe fn products(product: &RawProduct) -> bool {
    fits(&[product.in_size, product.out_size], &[product.block])
        && Set::best().is_some_and(|set| unsafe { products_with(set, product) })
}

/// Whether the kernels support these sizes and blocks.
pub fn fits(sizes: &[u64], blocks: &[u64]) -> bool {
    let whole = |&size: &u64| (size as usize).is_multiple_of(LANES);
    sizes.iter().all(|size| *size > 0 && whole(size))
        && blocks.iter().all(|block| *block as usize <= MAX_BLOCK && whole(block))
}

compiled!(products_with, all_products, RawProduct);

/// Weights of 32 outputs, the outputs of one input side by side.
#[repr(align(64))]
pub struct Panel([MaybeUninit<f32>; MAX_BLOCK * WIDTH]);

impl Default for Panel {
    fn default() -> Self {
        Panel([MaybeUninit::uninit(); MAX_BLOCK * WIDTH])
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

impl Group {
    /// The group from a row on; `sizes`: the distances between two rows of `x`, and of `out`.
    #[inline(always)]
    fn after(self, rows: usize, sizes: (usize, usize)) -> Self {
        let (x, out) = (self.x.wrapping_add(rows * sizes.0), self.out.wrapping_add(rows * sizes.1));
        Group { x, out, rows: self.rows - rows, ..self }
    }
}

/// Widths in and out of a matrix, the inputs in one chain of sums or `ANY_ORDER`, and the distance between two outputs.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub inner: usize,
    pub outer: usize,
    pub block: usize,
    pub stride: usize,
}

/// The products of one group, compiled once for each vector.
///
/// # Safety
/// As for `Vector`, and as the functions say.
pub trait Products: Vector {
    /// Multiply the rows of a group by its matrix. Rows of `x` and `out` are contiguous.
    ///
    /// # Safety
    /// All sizes are multiples of `LANES`, the block is at most `MAX_BLOCK`, and the memory is there.
    unsafe fn one(sizes: Sizes, group: Group, panel: &mut Panel);

    /// Multiply the rows of a group by `outputs` outputs of `len` inputs, in parts of nearly equal size. Weights are side by
    /// side for one input, and `step` apart for two. `start`: whether `out` is overwritten, and not added to.
    ///
    /// # Safety
    /// The memory is there. `sizes`: the distances between two rows of `x`, and of `out`. `outputs`: a multiple of `LANES`.
    unsafe fn all_rows(weights: (Group, usize), outputs: usize, sizes: (usize, usize), len: usize, start: bool);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Group, Panel, Products, Sizes, all_rows, one};
    use std::arch::x86_64::{__m256, __m512};

    macro_rules! products {
        ($vector:ty, $features:literal) => {
            impl Products for $vector {
                #[target_feature(enable = $features)]
                unsafe fn one(sizes: Sizes, group: Group, panel: &mut Panel) {
                    unsafe { one::<Self>(sizes, group, panel) }
                }
                #[target_feature(enable = $features)]
                unsafe fn all_rows(
                    weights: (Group, usize),
                    outputs: usize,
                    sizes: (usize, usize),
                    len: usize,
                    start: bool,
                ) {
                    unsafe { all_rows::<Self>(weights, outputs, sizes, len, start) }
                }
            }
        };
    }
    products!(__m256, "avx2,fma");
    products!(__m512, "avx512f");
}

#[inline(always)]
unsafe fn all_products<V: Products>(product: &RawProduct) -> bool {
    let mut panel = Panel::default();
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
            unsafe { V::one(sizes, group, &mut panel) };
        }
        before += rows;
    }
    true
}

#[inline(always)]
unsafe fn one<V: Products>(sizes: Sizes, group: Group, panel: &mut Panel) {
    let Sizes { inner, outer, block, stride } = sizes;
    if block == ANY_ORDER && group.rows <= MOST_DOTS {
        return unsafe { dots::<V>(sizes, group) };
    }
    let block = if block == ANY_ORDER { inner.min(MAX_BLOCK) } else { block };
    for output in (0..outer).step_by(WIDTH) {
        let outputs = WIDTH.min(outer - output);
        for input in (0..inner).step_by(block) {
            let (len, from) = (block.min(inner - input), group.weight.wrapping_add(output * stride + input));
            let part = Group {
                x: group.x.wrapping_add(input),
                weight: panel.0.as_ptr().cast(),
                out: group.out.wrapping_add(output),
                ..group
            };
            unsafe {
                turn::<V>(from, stride, (outputs, len), panel);
                V::all_rows((part, outputs), outputs, (inner, outer), len, input == 0);
            }
        }
    }
}

/// Write `outputs` outputs of `len` inputs into the panel.
#[inline(always)]
unsafe fn turn<V: Vector>(from: *const f32, stride: usize, (outputs, len): (usize, usize), panel: &mut Panel) {
    let to: *mut f32 = panel.0.as_mut_ptr().cast();
    for part in (0..outputs).step_by(V::LANES) {
        for k in (0..len).step_by(V::LANES) {
            let square = from.wrapping_add(part * stride + k);
            if k.is_multiple_of(LANES) {
                (0..V::LANES).for_each(|row| fetch(square.wrapping_add((outputs + row) * stride)));
            }
            unsafe { V::transpose(square, stride, to.add(k * outputs + part), outputs) };
        }
    }
}

#[inline(always)]
unsafe fn all_rows<V: Vector>(
    (group, step): (Group, usize),
    outputs: usize,
    sizes: (usize, usize),
    len: usize,
    start: bool,
) {
    let mut left = group;
    while left.rows > 0 {
        let rows = left.rows.div_ceil(left.rows.div_ceil(V::ROWS));
        let mut at = 0;
        while at < outputs {
            let (weight, out) = (left.weight.wrapping_add(at), left.out.wrapping_add(at));
            let part = (Group { weight, out, ..left }, step);
            let vectors = (outputs - at) / V::LANES;
            unsafe {
                at += V::LANES
                    * match (rows, vectors) {
                        (1, 4..) => some_rows::<V, 1, 4>(part, sizes, len, start),
                        (2, 4..) => some_rows::<V, 2, 4>(part, sizes, len, start),
                        (3, 4..) => some_rows::<V, 3, 4>(part, sizes, len, start),
                        (1, 2..) => some_rows::<V, 1, 2>(part, sizes, len, start),
                        (2, 2..) => some_rows::<V, 2, 2>(part, sizes, len, start),
                        (3, 2..) => some_rows::<V, 3, 2>(part, sizes, len, start),
                        (4, 2..) => some_rows::<V, 4, 2>(part, sizes, len, start),
                        (5, 2..) => some_rows::<V, 5, 2>(part, sizes, len, start),
                        (6, 2..) => some_rows::<V, 6, 2>(part, sizes, len, start),
                        (7, 2..) => some_rows::<V, 7, 2>(part, sizes, len, start),
                        (8, 2..) => some_rows::<V, 8, 2>(part, sizes, len, start),
                        (1, _) => some_rows::<V, 1, 1>(part, sizes, len, start),
                        (2, _) => some_rows::<V, 2, 1>(part, sizes, len, start),
                        (3, _) => some_rows::<V, 3, 1>(part, sizes, len, start),
                        (4, _) => some_rows::<V, 4, 1>(part, sizes, len, start),
                        (5, _) => some_rows::<V, 5, 1>(part, sizes, len, start),
                        (6, _) => some_rows::<V, 6, 1>(part, sizes, len, start),
                        (7, _) => some_rows::<V, 7, 1>(part, sizes, len, start),
                        _ => some_rows::<V, 8, 1>(part, sizes, len, start),
                    };
            }
        }
        left = left.after(rows, sizes);
    }
}

/// Multiply `R` rows by `P` vectors of outputs. Returns `P`.
#[inline(always)]
unsafe fn some_rows<V: Vector, const R: usize, const P: usize>(
    (group, step): (Group, usize),
    (inner, outer): (usize, usize),
    len: usize,
    start: bool,
) -> usize {
    if R > V::ROWS || P * V::LANES < LANES {
        return P; // not called
    }
    unsafe {
        let mut sums = [[V::all(0.0); P]; R];
        for k in 0..len {
            let from = group.weight.add(k * step);
            if R < P {
                let mut x = [V::all(0.0); R];
                x.iter_mut().enumerate().for_each(|(r, x)| *x = V::all(*group.x.add(r * inner + k)));
                for p in 0..P {
                    let w = V::load(from.add(p * V::LANES));
                    sums.iter_mut().zip(x).for_each(|(sums, x)| sums[p] = x.times_plus(w, sums[p]));
                }
            } else {
                let mut w = [V::all(0.0); P];
                w.iter_mut().enumerate().for_each(|(p, w)| *w = V::load(from.add(p * V::LANES)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = V::all(*group.x.add(r * inner + k));
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum = x.times_plus(w, *sum);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                let at = group.out.wrapping_add(r * outer + p * V::LANES);
                (if start { sum } else { V::load(at).plus(sum) }).store(at);
            }
        }
    }
    P
}

/// Outputs that are summed along vectors at a time.
const FOUR: usize = 4;

/// Multiply the rows of a group by its matrix, four outputs at a time.
#[inline(always)]
unsafe fn dots<V: Vector>(sizes: Sizes, group: Group) {
    for output in (0..sizes.outer).step_by(FOUR) {
        let (weight, out) = (group.weight.wrapping_add(output * sizes.stride), group.out.wrapping_add(output));
        let mut left = Group { weight, out, ..group };
        let mut next = 0; // of the four outputs to be fetched
        while left.rows > 0 {
            let passes = left.rows.div_ceil(V::DOT_ROWS);
            let rows = left.rows.div_ceil(passes);
            let ahead = (FOUR - next).div_ceil(passes);
            let from = (next + FOUR) * sizes.stride;
            unsafe {
                match rows {
                    1 => fetching::<V, 1>(sizes, left, ahead, from),
                    2 => fetching::<V, 2>(sizes, left, ahead, from),
                    3 => fetching::<V, 3>(sizes, left, ahead, from),
                    4 => fetching::<V, 4>(sizes, left, ahead, from),
                    _ => fetching::<V, 5>(sizes, left, ahead, from),
                }
            }
            next += ahead;
            left = left.after(rows, (sizes.inner, sizes.outer));
        }
    }
}

#[inline(always)]
unsafe fn fetching<V: Vector, const R: usize>(sizes: Sizes, group: Group, ahead: usize, from: usize) {
    if R > V::DOT_ROWS {
        return; // not called
    }
    unsafe {
        match ahead {
            0 => some_dots::<V, R, 0>(sizes, group, from),
            1 => some_dots::<V, R, 1>(sizes, group, from),
            2 => some_dots::<V, R, 2>(sizes, group, from),
            _ => some_dots::<V, R, FOUR>(sizes, group, from),
        }
    }
}

/// Multiply `R` rows by four outputs, and fetch the weights of `AHEAD` others, which begin at `from`.
#[inline(always)]
unsafe fn some_dots<V: Vector, const R: usize, const AHEAD: usize>(sizes: Sizes, group: Group, from: usize) {
    unsafe {
        let mut sums = [[V::all(0.0); FOUR]; R];
        for line in (0..sizes.inner).step_by(LANES) {
            for o in 0..AHEAD {
                fetch(group.weight.wrapping_add(from + o * sizes.stride + line));
            }
            for k in (line..line + LANES).step_by(V::LANES) {
                let mut x = [V::all(0.0); R];
                x.iter_mut().enumerate().for_each(|(r, x)| *x = V::load(group.x.add(r * sizes.inner + k)));
                for o in 0..FOUR {
                    let w = V::load(group.weight.wrapping_add(o * sizes.stride + k));
                    sums.iter_mut().zip(x).for_each(|(sums, x)| sums[o] = x.times_plus(w, sums[o]));
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            V::store_sums(sums, group.out.wrapping_add(r * sizes.outer));
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::vector::plain::Plain;

    impl Products for Plain {
        unsafe fn one(sizes: Sizes, group: Group, panel: &mut Panel) {
            unsafe { one::<Self>(sizes, group, panel) }
        }
        unsafe fn all_rows(weights: (Group, usize), outputs: usize, sizes: (usize, usize), len: usize, start: bool) {
            unsafe { all_rows::<Self>(weights, outputs, sizes, len, start) }
        }
    }

    pub fn numbers(count: usize, seed: u32) -> Vec<f32> {
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
        let rows = [3u64, 0, 1, 21, 37, 8, 70];
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
        let groups = rows.iter().enumerate().flat_map(|(group, &rows)| (0..rows).map(move |_| group)).enumerate();
        for set in Set::available().map(Some).chain([None]) {
            for order in [block as u64, ANY_ORDER as u64] {
                let product = RawProduct { block: order, ..product };
                assert!(match set {
                    Some(set) => unsafe { products_with(set, &product) },
                    None => unsafe { all_products::<Plain>(&product) },
                });
                for (row, group) in groups.clone() {
                    for output in 0..outer {
                        let (x, from) = (&x[row * inner..][..inner], (group * outer + output) * (inner + gap));
                        let found = unsafe { *product.out.add(row * outer + output) };
                        let expected = chains(x, &w[from..][..inner], block);
                        if order > 0 {
                            assert_eq!(found.to_bits(), expected.to_bits(), "{set:?}");
                        }
                        assert!((found - expected).abs() < 1e-4, "{set:?} {found} {expected}");
                    }
                }
            }
        }
        assert!(!unsafe { products(&RawProduct { in_size: 200, ..product }) });
        assert!(!unsafe { products(&RawProduct { block: 208, ..product }) });
    }
}
