//! Several operators of a decoded token at once: the experts of a layer, attention to the keys of slots, norms.
//!
//! Between the products of few rows (`product`), a model of some million parameters spends most of its time in calls of
//! operators on a few kilobytes. The experts have the bits of the operators one by one: the exponential is Sleef's
//! `expf_u10`, with which torch computes silu, and a token's experts are added by fused multiply-adds. The caller measures
//! whether they have. Attention and norms have an order of their own.

use crate::product::{LANES, MAX_BLOCK};

/// The experts of a layer: for each token Σ gate · down(silu(first half of h) · second half), where h = gate_up x.
///
/// `x`, `out`: [tokens, width]. `gates`, `experts`: [tokens, top_k]. `gate_up`: [num_experts, 2 · inner, width], `down`:
/// [num_experts, width, inner]; all contiguous. `block_in`, `block_down`: the inputs in one chain of sums.
#[repr(C)]
pub struct RawExperts {
    pub x: *const f32,
    pub gates: *const f32,
    pub experts: *const i64,
    pub gate_up: *const f32,
    pub down: *const f32,
    pub out: *mut f32,
    pub tokens: u64,
    pub top_k: u64,
    pub num_experts: u64,
    pub width: u64,
    pub inner: u64,
    pub block_in: u64,
    pub block_down: u64,
}

/// Attention of one token for each of some slots to the keys of its slot.
///
/// `q`: [num, heads, group, key_width], `out`: [num, heads, group, value_width], contiguous. `keys`: [slots, heads, length,
/// key_width], and `values` alike. `slots`, `counts`: the slot of each token, and how many keys it sees.
#[repr(C)]
pub struct RawAttention {
    pub q: *const f32,
    pub keys: *const f32,
    pub values: *const f32,
    pub out: *mut f32,
    pub slots: *const i64,
    pub counts: *const i64,
    pub num: u64,
    pub heads: u64,
    pub group: u64,
    pub key_width: u64,
    pub value_width: u64,
    pub length: u64,
    pub scale: f32,
}

/// RMSNorm of rows: x / √(mean x² + eps) · weight. `x`, `out`: [rows, width], contiguous; `weight`: [width], or null for 1.
#[repr(C)]
pub struct RawNorm {
    pub x: *const f32,
    pub weight: *const f32,
    pub out: *mut f32,
    pub rows: u64,
    pub width: u64,
    pub eps: f32,
}

fn fits(sizes: &[u64], blocks: &[u64]) -> bool {
    let whole = sizes.iter().chain(blocks).all(|&size| size > 0 && (size as usize).is_multiple_of(LANES));
    whole && blocks.iter().all(|&block| block as usize <= MAX_BLOCK)
}

#[cfg(target_arch = "x86_64")]
fn is_able() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

/// Compute the experts on this thread. Returns false, and writes nothing, where the machine has no AVX-512, or a size is no
/// multiple of the vector's, or a token has an expert that there is not.
///
/// # Safety
/// The request describes existing memory, and `out` is not read or written by others.
pub unsafe fn experts(request: &RawExperts) -> bool {
    if !fits(&[request.width, request.inner], &[request.block_in, request.block_down]) {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    if is_able() {
        return unsafe { avx512::experts(request) };
    }
    false
}

/// Compute attention on this thread. Returns false, and writes nothing, where the machine has no AVX-512, or a size is no
/// multiple of the vector's.
///
/// # Safety
/// As `experts`; slots and counts are within the memory, and each slot has `length` keys, a multiple of the vector's.
pub unsafe fn attention(request: &RawAttention) -> bool {
    if !fits(&[request.key_width, request.value_width, request.length], &[]) {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    if is_able() {
        unsafe { avx512::attention(request) };
        return true;
    }
    false
}

/// Compute the norms on this thread. Returns false, and writes nothing, where the machine has no AVX-512, or the width is
/// no multiple of the vector's.
///
/// # Safety
/// As `experts`.
pub unsafe fn norm(request: &RawNorm) -> bool {
    if !fits(&[request.width], &[]) {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    if is_able() {
        unsafe { avx512::norm(request) };
        return true;
    }
    false
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{RawAttention, RawExperts, RawNorm};
    use crate::product::avx512::{Group, Panel, Sizes, all_rows, one};
    use crate::product::{LANES, MAX_BLOCK};
    use std::arch::x86_64::*;

    /// Memory without values; all of it is written before it is read.
    fn room(numbers: usize) -> Vec<f32> {
        Vec::with_capacity(numbers)
    }

    #[target_feature(enable = "avx512f")]
    pub unsafe fn experts(r: &RawExperts) -> bool {
        let (tokens, k, count) = (r.tokens as usize, r.top_k as usize, r.num_experts as usize);
        let (width, inner) = (r.width as usize, r.inner as usize);
        let chosen = unsafe { std::slice::from_raw_parts(r.experts, tokens * k) };
        let mut starts = vec![0usize; count + 1];
        for &expert in chosen {
            if expert < 0 || expert as usize >= count {
                return false;
            }
            starts[expert as usize + 1] += 1;
        }
        let most = starts.iter().copied().max().unwrap_or(0);
        for expert in 0..count {
            starts[expert + 1] += starts[expert];
        }
        let (mut next, mut order, mut places) = (starts.clone(), vec![0usize; tokens * k], vec![0usize; tokens * k]);
        for (choice, &expert) in chosen.iter().enumerate() {
            let place = &mut next[expert as usize];
            (order[*place], places[choice]) = (choice, *place);
            *place += 1;
        }
        let (mut x, mut h, mut all) = (room(most * width), room(most * 2 * inner), room(tokens * k * width));
        let (x, h, all) = (x.as_mut_ptr(), h.as_mut_ptr(), all.as_mut_ptr());
        let first = Sizes { inner: width, outer: 2 * inner, block: r.block_in as usize, stride: width };
        let second = Sizes { inner, outer: width, block: r.block_down as usize, stride: inner };
        let mut panel = Panel::new();
        for expert in 0..count {
            let own = &order[starts[expert]..starts[expert + 1]];
            if own.is_empty() {
                continue;
            }
            for (row, choice) in own.iter().enumerate() {
                unsafe { std::ptr::copy_nonoverlapping(r.x.add(choice / k * width), x.add(row * width), width) };
            }
            let up = r.gate_up.wrapping_add(expert * 2 * inner * width);
            let down = r.down.wrapping_add(expert * width * inner);
            let out = all.wrapping_add(starts[expert] * width);
            unsafe {
                one(first, Group { x, weight: up, out: h, rows: own.len() }, &mut panel);
                for row in 0..own.len() {
                    gated(h.add(row * 2 * inner), h.add(row * inner), inner); // begins where an earlier row was read
                }
                one(second, Group { x: h, weight: down, out, rows: own.len() }, &mut panel);
            }
        }
        for token in 0..tokens {
            let (own, gates) = (&places[token * k..(token + 1) * k], r.gates.wrapping_add(token * k));
            for at in (0..width).step_by(LANES) {
                let mut sum = _mm512_setzero_ps();
                for (choice, place) in own.iter().enumerate() {
                    let row = unsafe { _mm512_loadu_ps(all.add(place * width + at)) };
                    let gate = _mm512_set1_ps(unsafe { *gates.add(choice) });
                    sum = if choice == 0 { _mm512_mul_ps(row, gate) } else { _mm512_fmadd_ps(row, gate, sum) };
                }
                unsafe { _mm512_storeu_ps(r.out.add(token * width + at), sum) };
            }
        }
        true
    }

    /// Write silu(a) · b for `num` numbers a and as many b behind them. `out` may begin at or before `h`.
    #[target_feature(enable = "avx512f")]
    unsafe fn gated(h: *const f32, out: *mut f32, num: usize) {
        for at in (0..num).step_by(LANES) {
            let (a, b) = unsafe { (_mm512_loadu_ps(h.add(at)), _mm512_loadu_ps(h.add(num + at))) };
            let negative = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(i32::MIN)));
            let silu = _mm512_div_ps(a, _mm512_add_ps(_mm512_set1_ps(1.0), exp(negative)));
            unsafe { _mm512_storeu_ps(out.add(at), _mm512_mul_ps(silu, b)) };
        }
    }

    /// Sleef's `expf_u10`.
    #[target_feature(enable = "avx512f")]
    fn exp(d: __m512) -> __m512 {
        let s1 = _mm512_set1_ps;
        let q = _mm512_cvtps_epi32(_mm512_mul_ps(d, s1(std::f32::consts::LOG2_E)));
        let whole = _mm512_cvtepi32_ps(q);
        let s = _mm512_fmadd_ps(whole, s1(-0.693_145_75), d);
        let s = _mm512_fmadd_ps(whole, s1(-1.428_606_8e-6), s);
        let mut u = s1(0.000_198_527_62);
        for c in [0.001_393_043_6, 0.008_333_361, 0.041_666_485, 0.166_666_67, 0.5] {
            u = _mm512_fmadd_ps(u, s, s1(c));
        }
        let u = _mm512_add_ps(s1(1.0), _mm512_fmadd_ps(_mm512_mul_ps(s, s), u, s));
        let half = _mm512_srai_epi32::<1>(q);
        let u = _mm512_mul_ps(_mm512_mul_ps(u, power(half)), power(_mm512_sub_epi32(q, half)));
        let u = _mm512_mask_mov_ps(u, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(d, s1(-104.0)), _mm512_setzero_ps());
        _mm512_mask_mov_ps(u, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(d, s1(100.0)), s1(f32::INFINITY))
    }

    /// 2 to the power of q.
    #[target_feature(enable = "avx512f")]
    fn power(q: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(q, _mm512_set1_epi32(127))))
    }

    #[target_feature(enable = "avx512f")]
    pub unsafe fn attention(r: &RawAttention) {
        let (heads, group, length) = (r.heads as usize, r.group as usize, r.length as usize);
        let (keys_width, values_width) = (r.key_width as usize, r.value_width as usize);
        let (mut panel, mut scores) = (Panel::new(), room(group * length));
        let (scores, mut totals) = (scores.as_mut_ptr(), vec![0.0; group]);
        for token in 0..r.num as usize {
            let (slot, count) = unsafe { (*r.slots.add(token) as usize, *r.counts.add(token) as usize) };
            let outer = count.next_multiple_of(LANES);
            let sizes = Sizes { inner: keys_width, outer, block: keys_width.min(MAX_BLOCK), stride: keys_width };
            for head in 0..heads {
                let (own, kept) = ((token * heads + head) * group, (slot * heads + head) * length);
                let (q, weight) = (r.q.wrapping_add(own * keys_width), r.keys.wrapping_add(kept * keys_width));
                let (values, out) =
                    (r.values.wrapping_add(kept * values_width), r.out.wrapping_add(own * values_width));
                unsafe {
                    one(sizes, Group { x: q, weight, out: scores, rows: group }, &mut panel);
                    for (row, total) in totals.iter_mut().enumerate() {
                        *total = softmax(scores.add(row * outer), count, outer, r.scale);
                    }
                    for at in (0..values_width).step_by(2 * LANES) {
                        let part = Group {
                            x: scores,
                            weight: values.wrapping_add(at),
                            out: out.wrapping_add(at),
                            rows: group,
                        };
                        let widths = (outer, values_width);
                        match values_width - at {
                            LANES => all_rows::<1>((part, values_width), widths, count, true),
                            _ => all_rows::<2>((part, values_width), widths, count, true),
                        }
                    }
                    for (row, total) in totals.iter().enumerate() {
                        for at in (0..values_width).step_by(LANES) {
                            let at = out.add(row * values_width + at);
                            _mm512_storeu_ps(at, _mm512_div_ps(_mm512_loadu_ps(at), _mm512_set1_ps(*total)));
                        }
                    }
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    pub unsafe fn norm(r: &RawNorm) {
        let width = r.width as usize;
        for row in 0..r.rows as usize {
            let (x, out) = (r.x.wrapping_add(row * width), r.out.wrapping_add(row * width));
            let mut squares = _mm512_setzero_ps();
            for at in (0..width).step_by(LANES) {
                let part = unsafe { _mm512_loadu_ps(x.add(at)) };
                squares = _mm512_fmadd_ps(part, part, squares);
            }
            let scale = _mm512_set1_ps(1.0 / (_mm512_reduce_add_ps(squares) / width as f32 + r.eps).sqrt());
            for at in (0..width).step_by(LANES) {
                let part = _mm512_mul_ps(unsafe { _mm512_loadu_ps(x.add(at)) }, scale);
                let weighted = match r.weight.is_null() {
                    true => part,
                    false => _mm512_mul_ps(part, unsafe { _mm512_loadu_ps(r.weight.add(at)) }),
                };
                unsafe { _mm512_storeu_ps(out.add(at), weighted) };
            }
        }
    }

    /// Replace `count` scores by exp(scale · (score - highest)), and return their sum. Up to `padded` scores are written.
    #[target_feature(enable = "avx512f")]
    unsafe fn softmax(scores: *mut f32, count: usize, padded: usize, scale: f32) -> f32 {
        let (least, factor) = (_mm512_set1_ps(f32::NEG_INFINITY), _mm512_set1_ps(scale));
        let seen = |at: usize| if count - at >= LANES { !0 } else { !(!0u16 << (count - at)) };
        let mut highest = least;
        for at in (0..padded).step_by(LANES) {
            let scaled = _mm512_mul_ps(unsafe { _mm512_loadu_ps(scores.add(at)) }, factor);
            let visible = _mm512_mask_mov_ps(least, seen(at), scaled);
            highest = _mm512_max_ps(highest, visible);
            unsafe { _mm512_storeu_ps(scores.add(at), visible) };
        }
        let top = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
        let mut sum = _mm512_setzero_ps();
        for at in (0..padded).step_by(LANES) {
            let share = exp(_mm512_sub_ps(unsafe { _mm512_loadu_ps(scores.add(at)) }, top));
            sum = _mm512_add_ps(sum, share);
            unsafe { _mm512_storeu_ps(scores.add(at), share) };
        }
        _mm512_reduce_add_ps(sum)
    }
}
