//! The primitives of a coded tile: planes of bits, Rice codes, and LEB128.

/// The reason why bytes are refused.
pub type Refused = &'static str;

/// Maximum run of zeros in a unary plane. Larger quotients are stored as escapes.
pub const CAP: u32 = 24;
/// Maximum Rice parameter, and maximum number of low bits.
pub const MAX_LOW: u32 = 31;

/// The Rice parameter for gaps between `listed` of `universe` items, or for numbers with that mean.
pub fn rice(universe: u64, listed: u64) -> u32 {
    let mut low = 0;
    while low < MAX_LOW && listed > 0 && (listed << (low + 1)) * 181 <= universe * 128 {
        low += 1;
    }
    low
}

/// Appends bits, lowest first. Space is reserved in advance, so a `put` is a few instructions without a branch.
#[derive(Default)]
pub struct BitWriter {
    bytes: Vec<u8>,
    /// Whole bytes written; what is held comes after them.
    used: usize,
    held: u64,
    count: u32,
}

impl BitWriter {
    pub fn clear(&mut self) {
        (self.used, self.held, self.count) = (0, 0, 0);
    }

    /// Append up to `bits` bits by calling `write` with the end of the plane as a separate value, so that it stays in
    /// registers.
    #[inline(always)]
    pub fn extend(&mut self, bits: u64, write: impl FnOnce(&mut End)) {
        let needed = self.used + (bits / 8) as usize + 16;
        if self.bytes.len() < needed {
            self.bytes.resize(needed.next_power_of_two(), 0);
        }
        let start = self.bytes.as_mut_ptr();
        let mut end = End { at: start.wrapping_add(self.used), held: self.held, count: self.count };
        write(&mut end);
        self.used = end.at as usize - start as usize;
        debug_assert!(self.used + 8 <= self.bytes.len());
        (self.held, self.count) = (end.held, end.count);
    }

    pub fn num_bits(&self) -> u64 {
        8 * self.used as u64 + self.count as u64
    }

    /// Append the plane's bytes to `out`. Padding bits are 0.
    pub fn finish_into(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes[..self.used]);
        if self.count > 0 {
            out.push(self.held as u8);
        }
    }
}

/// The end of a plane that is being written.
pub struct End {
    at: *mut u8,
    held: u64,
    count: u32,
}

impl End {
    /// Append `width` bits (at most 56).
    ///
    /// # Safety
    /// Space was reserved for them by `BitWriter::extend`.
    #[inline(always)]
    pub unsafe fn put(&mut self, value: u64, width: u32) {
        debug_assert!(width <= 56);
        self.held |= value << self.count;
        self.count += width;
        unsafe { self.at.cast::<[u8; 8]>().write(self.held.to_le_bytes()) };
        let whole = self.count >> 3;
        self.at = self.at.wrapping_add(whole as usize);
        self.held >>= 8 * whole;
        self.count &= 7;
    }
}

pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Takes fields from the front of a slice.
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    pub fn byte(&mut self) -> Result<u8, Refused> {
        let (&first, rest) = self.0.split_first().ok_or("it ends too early")?;
        self.0 = rest;
        Ok(first)
    }

    pub fn take(&mut self, count: usize) -> Result<&'a [u8], Refused> {
        if count > self.0.len() {
            return Err("it ends too early");
        }
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        Ok(taken)
    }

    /// Decode an LEB128 integer of at most `limit`.
    pub fn varint(&mut self, limit: u64) -> Result<u64, Refused> {
        let mut value = 0u64;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            value |= ((byte & 0x7F) as u64) << shift;
            if byte < 0x80 {
                return if value <= limit { Ok(value) } else { Err("a number is over its limit") };
            }
        }
        Err("a number is over its limit")
    }

    pub fn low(&mut self) -> Result<u32, Refused> {
        let low = self.byte()? as u32;
        if low <= MAX_LOW { Ok(low) } else { Err("too many low bits") }
    }

    /// Take the bytes of a plane of `bits` bits.
    pub fn plane(&mut self, bits: u64) -> Result<&'a [u8], Refused> {
        if bits > 8 * self.0.len() as u64 {
            return Err("a plane is longer than its tile");
        }
        self.take(bits.div_ceil(8) as usize)
    }
}

/// A plane of `bits` bits at `start`, followed by at least `PADDING` readable bytes.
#[derive(Clone, Copy)]
pub struct Plane {
    start: *const u8,
    bits: u64,
}

/// Number of readable bytes required after every plane.
pub const PADDING: usize = 16;

impl Plane {
    /// # Safety
    /// `PADDING` bytes behind the plane's are readable, for as long as the plane is used.
    pub unsafe fn new(bytes: &[u8], bits: u64) -> Self {
        debug_assert!(bits.div_ceil(8) as usize <= bytes.len());
        Self { start: bytes.as_ptr(), bits }
    }

    /// At least 57 bits starting at bit `at`, which is at most the length of the plane.
    #[inline(always)]
    fn word(self, at: u64) -> u64 {
        debug_assert!(at <= self.bits);
        u64::from_le_bytes(unsafe { self.start.add((at >> 3) as usize).cast::<[u8; 8]>().read() })
    }
}

/// Reads fixed-width numbers from a plane. The caller has checked that the plane is long enough.
pub struct LowBits {
    plane: Plane,
    at: u64,
}

impl LowBits {
    pub fn new(plane: Plane) -> Self {
        Self { plane, at: 0 }
    }

    /// Read `width` bits (at most 32).
    #[inline(always)]
    pub fn take(&mut self, width: u32) -> u32 {
        let value = self.plane.word(self.at) >> (self.at & 7) & ((1u64 << width) - 1);
        self.at += width as u64;
        value as u32
    }
}

/// Reads unary quotients: zeros, then a one.
pub struct Unary {
    plane: Plane,
    /// What is left of the 64 bits from `base` on.
    word: u64,
    base: u64,
    /// One past the last one that was read.
    next: u64,
}

impl Unary {
    pub fn new(plane: Plane) -> Self {
        let mut unary = Self { plane, word: 0, base: 0, next: 0 };
        unary.word = unary.load();
        unary
    }

    /// The 64 bits from `base` on, without those after the plane.
    #[inline(always)]
    fn load(&self) -> u64 {
        let left = self.plane.bits - self.base;
        let word = self.plane.word(self.base);
        if left >= 64 { word } else { word & ((1 << left) - 1) }
    }

    /// Append `count` quotients, each at most `CAP`, to `out`.
    #[inline(always)]
    pub fn take(&mut self, count: usize, out: &mut Vec<u32>) -> Result<(), Refused> {
        out.clear();
        out.reserve(count);
        let mut longest = 0;
        let mut at = out.as_mut_ptr();
        let mut left = count;
        while left > 0 {
            while self.word == 0 {
                self.base += 64;
                if self.base >= self.plane.bits {
                    return Err("fewer numbers than expected");
                }
                self.word = self.load();
            }
            let some = left.min(self.word.count_ones() as usize);
            let (mut word, mut next) = (self.word, self.next);
            for _ in 0..some {
                let one = self.base + word.trailing_zeros() as u64;
                word &= word - 1;
                let quotient = one - next;
                next = one + 1;
                longest = longest.max(quotient);
                unsafe {
                    at.write(quotient as u32);
                    at = at.add(1);
                }
            }
            (self.word, self.next) = (word, next);
            left -= some;
        }
        unsafe { out.set_len(count) };
        if longest > CAP as u64 { Err("a run of zeros is too long") } else { Ok(()) }
    }

    /// Refuse the plane unless it ends with the one-bit of the last number.
    pub fn end(&self) -> Result<(), Refused> {
        if self.next == self.plane.bits { Ok(()) } else { Err("more numbers than expected") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unary_and_low_bits_come_back() {
        let values: Vec<u32> = (0..1000).map(|i| i * i % 23).collect();
        let (mut unary, mut low) = (BitWriter::default(), BitWriter::default());
        unary.extend(25 * 1000, |end| values.iter().for_each(|&v| unsafe { end.put(1 << v, v + 1) }));
        low.extend(5 * 1000, |end| values.iter().for_each(|&v| unsafe { end.put(v as u64, 5) }));
        let (bits, mut a, mut b) = (unary.num_bits(), Vec::new(), Vec::new());
        unary.finish_into(&mut a);
        low.finish_into(&mut b);
        a.resize(a.len() + PADDING, 0xFF);
        b.resize(b.len() + PADDING, 0xFF);
        let mut unary = Unary::new(unsafe { Plane::new(&a, bits) });
        let mut low = LowBits::new(unsafe { Plane::new(&b, 5000) });
        let mut quotients = Vec::new();
        assert_eq!(unary.take(1000, &mut quotients), Ok(()));
        assert_eq!(quotients, values);
        assert!(values.iter().all(|&value| low.take(5) == value));
        assert_eq!(unary.end(), Ok(()));
        assert!(unary.take(1, &mut quotients).is_err());
    }

    #[test]
    fn the_rice_parameter_follows_the_mean() {
        assert_eq!(rice(0, 0), 0);
        assert_eq!(rice(1, 1), 0);
        assert_eq!(rice(100, 1), 6);
        assert_eq!(rice(1 << 40, 1), MAX_LOW);
    }
}
