//! The bit layout of a code, and the monotone order in which steps are counted.

/// Maximum number of classes of a tile.
pub const MAX_CLASSES: usize = 16;

/// A dtype: `bits` of sign, exponent and mantissa, or an unsigned integer where there is no exponent.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub bits: u32,
    /// Width of the mantissa. Meaningless where `exponent_mask` is 0.
    pub shift: u32,
    /// 0: an unsigned integer.
    pub exponent_mask: u32,
}

/// A code in memory: u8, u16 or u32.
pub trait Code: Copy + PartialEq + Send + Sync + 'static {
    const BYTES: usize;
    const ZERO: Self;
    fn widen(self) -> u32;
    fn narrow(value: u32) -> Self;
    /// From `BYTES` little-endian bytes.
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! code {
    ($type:ty) => {
        impl Code for $type {
            const BYTES: usize = size_of::<$type>();
            const ZERO: Self = 0;
            #[inline(always)]
            fn widen(self) -> u32 {
                self as u32
            }
            #[inline(always)]
            fn narrow(value: u32) -> Self {
                value as $type
            }
            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("as many bytes as a code has"))
            }
        }
    };
}

code!(u8);
code!(u16);
code!(u32);

impl Kind {
    /// Create from values of a caller; None for an invalid layout.
    pub fn new(bits: u32, shift: u32, exponent_mask: u32) -> Option<Self> {
        let fits = matches!(bits, 4 | 8 | 16 | 32) && shift < bits && exponent_mask < 256;
        fits.then_some(Self { bits, shift, exponent_mask })
    }

    /// Number of unused bits if a code is shifted to the top of 32 bits, where arithmetic needs no masks.
    #[inline(always)]
    fn unused(self) -> u32 {
        32 - self.bits
    }

    pub fn holds(self, code: u32) -> bool {
        code <= u32::MAX >> self.unused()
    }

    #[inline(always)]
    pub fn exponent(self, code: u32) -> u32 {
        code >> self.shift & self.exponent_mask
    }

    /// The class of a code; 0 is the top octave: `high` and everything above.
    #[inline(always)]
    pub fn class(self, code: u32, high: u8, classes: u8) -> usize {
        let below = (high as u32).saturating_sub(self.exponent(code));
        below.min(classes as u32 - 1) as usize
    }

    /// The bits to flip to convert a code at the top of 32 bits to monotone order. `negative`: all ones for a set sign
    /// bit.
    #[inline(always)]
    fn flips(self, negative: u32) -> u32 {
        if self.exponent_mask == 0 { 0 } else { negative << self.unused() | 1 << 31 }
    }

    #[inline(always)]
    fn in_order(self, code: u32) -> u32 {
        let code = code << self.unused();
        code ^ self.flips((code as i32 >> 31) as u32)
    }

    #[inline(always)]
    fn in_code(self, ordered: u32) -> u32 {
        (ordered ^ self.flips(!(ordered as i32 >> 31) as u32)) >> self.unused()
    }

    /// The step from `old` to `new`, the shorter way around the scale.
    #[inline(always)]
    pub fn step(self, old: u32, new: u32) -> Step {
        let up = self.in_order(new).wrapping_sub(self.in_order(old)) as i32;
        let size = up.unsigned_abs() >> self.unused();
        Step::new(size.wrapping_sub(1), up < 0)
    }

    #[inline(always)]
    pub fn moved(self, old: u32, step: Step) -> u32 {
        // if the sign does not change, the code itself moves; in the opposite direction if it is negative
        let top = 1 << (self.bits - 1);
        let up = (old & top == 0) != step.down();
        let size = step.less() + 1;
        let new = old.wrapping_add(if up { size } else { size.wrapping_neg() });
        let stays = (new ^ old) & !(top - 1) == 0;
        if stays && self.exponent_mask != 0 { new } else { self.moved_in_order(old, step) }
    }

    #[inline(never)]
    fn moved_in_order(self, old: u32, step: Step) -> u32 {
        let size = (step.less() + 1) << self.unused();
        let down = (step.0 as i32) << 31 >> 31;
        self.in_code(self.in_order(old).wrapping_add((size as i32 ^ down).wrapping_sub(down) as u32))
    }

    /// The maximum step size minus 1.
    pub fn max_less(self) -> u32 {
        (1 << (self.bits - 1)) - 1
    }
}

/// A change by 1 to 2^31 units in the last place, with its direction, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step(u32);

impl Step {
    #[inline(always)]
    pub fn new(less: u32, down: bool) -> Self {
        Step(less << 1 | down as u32)
    }

    /// The size minus 1.
    #[inline(always)]
    pub fn less(self) -> u32 {
        self.0 >> 1
    }

    #[inline(always)]
    pub fn down(self) -> bool {
        self.0 & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_between_two_codes_leads_back_to_the_new_one() {
        for kind in [Kind::new(8, 3, 15).unwrap(), Kind::new(8, 0, 0).unwrap(), Kind::new(4, 1, 3).unwrap()] {
            for old in 0..1 << kind.bits {
                for new in (0..1 << kind.bits).filter(|&new| new != old) {
                    let step = kind.step(old, new);
                    assert!(step.less() <= kind.max_less());
                    assert_eq!(kind.moved(old, step), new);
                }
            }
        }
    }

    #[test]
    fn minus_zero_lies_one_below_zero() {
        let kind = Kind::new(16, 7, 255).unwrap();
        assert_eq!(kind.step(0x0000, 0x8000), Step::new(0, true));
    }
}
