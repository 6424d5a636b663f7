//! Several operators of a decoded token at once: the experts of a layer, attention to the keys of slots, norms.
//!
//! Between the products of few rows (`product`), a model of some million parameters spends most of its time in calls of
//! operators on a few kilobytes. The experts have the bits of the operators one by one: the exponential is Sleef's
//! `expf_u10`, with which torch computes silu, and a token's experts are added by fused multiply-adds. The caller measures
//! whether they have. Attention and norms have an order of their own.

use crate::product::{ANY_ORDER, Group, Panel, Products, Sizes, fits};
use crate::vector::{LANES, Set, Vector, compiled};

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

/// Compute the experts on this thread. Returns false, and writes nothing, where the machine has neither AVX-512 nor AVX2, or a size is no
/// multiple of the vector's, or a token has an expert that there is not.
///
/// # Safety
/// The request describes existing memory, and `out` is not read or written by others.
pub unsafe fn experts(request: &RawExperts) -> bool {
    if !fits(&[request.width, request.inner], &[request.block_in, request.block_down]) {
        return false;
    }
    Set::best().is_some_and(|set| unsafe { experts_with(set, request) })
}

/// Compute attention on this thread. Returns false, and writes nothing, where the machine has neither AVX-512 nor AVX2, or a size is no
/// multiple of the vector's.
///
/// # Safety
/// As `experts`; slots and counts are within the memory, and each slot has `length` keys, a multiple of the vector's.
pub unsafe fn attention(request: &RawAttention) -> bool {
    if !fits(&[request.key_width, request.value_width, request.length], &[]) {
        return false;
    }
    Set::best().is_some_and(|set| unsafe { attention_with(set, request) })
}

/// Compute the norms on this thread. Returns false, and writes nothing, where the machine has neither AVX-512 nor AVX2, or the width is
/// no multiple of the vector's.
///
/// # Safety
/// As `experts`.
pub unsafe fn norm(request: &RawNorm) -> bool {
    if !fits(&[request.width], &[]) {
        return false;
    }
    Set::best().is_some_and(|set| unsafe { norm_with(set, request) })
}

compiled!(experts_with, all_experts, RawExperts);
compiled!(attention_with, attend, RawAttention);
compiled!(norm_with, normalise, RawNorm);

/// Memory without values; all of it is written before it is read.
fn room(numbers: usize) -> Vec<f32> {
    Vec::with_capacity(numbers)
}

#[inline(always)]
unsafe fn all_experts<V: Products>(r: &RawExperts) -> bool {
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
    let mut panel = Panel::default();
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
            V::one(first, Group { x, weight: up, out: h, rows: own.len() }, &mut panel);
            for row in 0..own.len() {
                gated::<V>(h.add(row * 2 * inner), h.add(row * inner), inner); // begins where an earlier row was read
            }
            V::one(second, Group { x: h, weight: down, out, rows: own.len() }, &mut panel);
        }
    }
    for token in 0..tokens {
        let (own, gates) = (&places[token * k..(token + 1) * k], r.gates.wrapping_add(token * k));
        for at in (0..width).step_by(V::LANES) {
            unsafe {
                let mut sum = V::all(0.0);
                for (choice, place) in own.iter().enumerate() {
                    let row = V::load(all.add(place * width + at));
                    let gate = V::all(*gates.add(choice));
                    sum = if choice == 0 { row.times(gate) } else { row.times_plus(gate, sum) };
                }
                sum.store(r.out.add(token * width + at));
            }
        }
    }
    true
}

/// Write silu(a) · b for `num` numbers a and as many b behind them. `out` may begin at or before `h`.
#[inline(always)]
unsafe fn gated<V: Vector>(h: *const f32, out: *mut f32, num: usize) {
    for at in (0..num).step_by(V::LANES) {
        unsafe {
            let (a, b) = (V::load(h.add(at)), V::load(h.add(num + at)));
            let silu = a.over(V::all(1.0).plus(a.times(V::all(-1.0)).exp()));
            silu.times(b).store(out.add(at));
        }
    }
}

#[inline(always)]
unsafe fn attend<V: Products>(r: &RawAttention) -> bool {
    let (heads, group, length) = (r.heads as usize, r.group as usize, r.length as usize);
    let (keys_width, values_width) = (r.key_width as usize, r.value_width as usize);
    let (mut panel, mut scores) = (Panel::default(), room(group * length));
    let (scores, mut totals) = (scores.as_mut_ptr(), vec![0.0; group]);
    for token in 0..r.num as usize {
        let (slot, count) = unsafe { (*r.slots.add(token) as usize, *r.counts.add(token) as usize) };
        let outer = count.next_multiple_of(LANES);
        let sizes = Sizes { inner: keys_width, outer, block: ANY_ORDER, stride: keys_width };
        for head in 0..heads {
            let (own, kept) = ((token * heads + head) * group, (slot * heads + head) * length);
            let (q, weight) = (r.q.wrapping_add(own * keys_width), r.keys.wrapping_add(kept * keys_width));
            let (weights, out) = (r.values.wrapping_add(kept * values_width), r.out.wrapping_add(own * values_width));
            unsafe {
                V::one(sizes, Group { x: q, weight, out: scores, rows: group }, &mut panel);
                for (row, total) in totals.iter_mut().enumerate() {
                    *total = softmax::<V>(scores.add(row * outer), count, outer, r.scale);
                }
                let mixed = Group { x: scores, weight: weights, out, rows: group };
                V::all_rows((mixed, values_width), values_width, (outer, values_width), count, true);
                for (row, total) in totals.iter().enumerate() {
                    for at in (0..values_width).step_by(V::LANES) {
                        let at = out.add(row * values_width + at);
                        V::load(at).over(V::all(*total)).store(at);
                    }
                }
            }
        }
    }
    true
}

/// Replace `count` scores by exp(scale · (score - highest)), and return their sum. Up to `padded` scores are written.
#[inline(always)]
unsafe fn softmax<V: Vector>(scores: *mut f32, count: usize, padded: usize, scale: f32) -> f32 {
    unsafe {
        let (least, factor) = (V::all(f32::NEG_INFINITY), V::all(scale));
        let mut highest = least;
        for at in (0..padded).step_by(V::LANES) {
            let visible = V::load(scores.add(at)).times(factor).first(count.saturating_sub(at), least);
            highest = highest.max(visible);
            visible.store(scores.add(at));
        }
        let top = V::all(highest.highest());
        let mut sum = V::all(0.0);
        for at in (0..padded).step_by(V::LANES) {
            let share = V::load(scores.add(at)).minus(top).exp();
            sum = sum.plus(share);
            share.store(scores.add(at));
        }
        sum.sum()
    }
}

#[inline(always)]
unsafe fn normalise<V: Vector>(r: &RawNorm) -> bool {
    let width = r.width as usize;
    for row in 0..r.rows as usize {
        let (x, out) = (r.x.wrapping_add(row * width), r.out.wrapping_add(row * width));
        unsafe {
            let mut squares = V::all(0.0);
            for at in (0..width).step_by(V::LANES) {
                let part = V::load(x.add(at));
                squares = part.times_plus(part, squares);
            }
            let scale = V::all(1.0 / (squares.sum() / width as f32 + r.eps).sqrt());
            for at in (0..width).step_by(V::LANES) {
                let part = V::load(x.add(at)).times(scale);
                let weighted = if r.weight.is_null() { part } else { part.times(V::load(r.weight.add(at))) };
                weighted.store(out.add(at));
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::tests::numbers;
    use crate::vector::plain::Plain;

    /// What each set of the machine computes, then what `Plain` computes (`None`).
    fn of_each(count: usize, compute: impl Fn(Option<Set>, *mut f32) -> bool) -> Vec<Vec<f32>> {
        let one = |set| {
            let mut out = vec![f32::NAN; count];
            assert!(compute(set, out.as_mut_ptr()));
            out
        };
        Set::available().map(Some).chain([None]).map(one).collect()
    }

    fn near(found: &[Vec<f32>]) {
        let plain = found.last().unwrap();
        assert!(found.iter().flat_map(|one| one.iter().zip(plain)).all(|(a, b)| (a - b).abs() < 1e-4 && a.is_finite()));
    }

    #[test]
    fn experts_have_the_same_bits_with_vectors_of_any_width() {
        let (tokens, top_k, num_experts, width, inner) = (21, 2, 3, 80, 48);
        let (x, gates) = (numbers(tokens * width, 1), numbers(tokens * top_k, 2));
        let experts: Vec<i64> = (0..tokens * top_k).map(|choice| (choice % 5 % num_experts) as i64).collect();
        let (up, down) = (numbers(num_experts * 2 * inner * width, 3), numbers(num_experts * width * inner, 4));
        let compute = |block: u64| {
            of_each(tokens * width, |set, out| {
                let request = RawExperts {
                    x: x.as_ptr(),
                    gates: gates.as_ptr(),
                    experts: experts.as_ptr(),
                    gate_up: up.as_ptr(),
                    down: down.as_ptr(),
                    out,
                    tokens: tokens as u64,
                    top_k: top_k as u64,
                    num_experts: num_experts as u64,
                    width: width as u64,
                    inner: inner as u64,
                    block_in: block,
                    block_down: block,
                };
                match set {
                    Some(set) => unsafe { experts_with(set, &request) },
                    None => unsafe { all_experts::<Plain>(&request) },
                }
            })
        };
        let found = compute(32);
        let bits = |one: &Vec<f32>| one.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        assert!(found.iter().all(|one| bits(one) == bits(found.last().unwrap())));
        near(&found);
        near(&compute(ANY_ORDER as u64));
    }

    #[test]
    fn attention_and_norms_are_alike_with_vectors_of_any_width() {
        let (heads, group, width, value_width, length) = (2, 7, 48, 80, 64);
        let (slots, counts) = ([2i64, 0, 1], [1i64, 37, 64]);
        let (num, q) = (slots.len(), numbers(slots.len() * heads * group * width, 1));
        let (keys, values) = (numbers(3 * heads * length * width, 2), numbers(3 * heads * length * value_width, 3));
        near(&of_each(num * heads * group * value_width, |set, out| {
            let request = RawAttention {
                q: q.as_ptr(),
                keys: keys.as_ptr(),
                values: values.as_ptr(),
                out,
                slots: slots.as_ptr(),
                counts: counts.as_ptr(),
                num: num as u64,
                heads: heads as u64,
                group: group as u64,
                key_width: width as u64,
                value_width: value_width as u64,
                length: length as u64,
                scale: 0.3,
            };
            match set {
                Some(set) => unsafe { attention_with(set, &request) },
                None => unsafe { attend::<Plain>(&request) },
            }
        }));
        near(&of_each(values.len(), |set, out| {
            let (rows, width) = ((values.len() / value_width) as u64, value_width as u64);
            let request = RawNorm { x: values.as_ptr(), weight: q.as_ptr(), out, rows, width, eps: 1e-6 };
            match set {
                Some(set) => unsafe { norm_with(set, &request) },
                None => unsafe { normalise::<Plain>(&request) },
            }
        }));
    }
}
