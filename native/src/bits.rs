//! Planes of bits, Rice numbers and LEB128: what a tile is written in.

/// Why bytes are refused. The text says what is wrong with them.
pub type Refused = &'static str;

/// The longest run of zeros in a unary plane; what would be longer is an escape.
pub const CAP: u32 = 24;
/// The largest Rice parameter, and the largest number of raw low bits.
pub const MAX_LOW: u32 = 31;

/// The Rice parameter for gaps between `listed` of `universe` items, or for numbers of that mean.
pub fn rice(universe: u64, listed: u64) -> u32 {
    let mut low = 0;
    while low < MAX_LOW && listed > 0 && (listed << (low + 1)) * 181 <= universe * 128 {
        low += 1;
    }
    low
}

/// Appends bits, lowest first. Room is made in advance, so that a `put` is a few instructions without a branch.
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

    /// Writes up to `bits` bits more by `write`, which gets the end of the plane as a value of its own: what it
    /// changes there stays in registers.
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

    /// The plane's bytes, appended to `out`; padding bits are 0.
    pub fn finish_into(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes[..self.used]);
        if self.count > 0 {
            out.push(self.held as u8);
        }
    }
}

/// Where a plane of bits goes on.
pub struct End {
    at: *mut u8,
    held: u64,
    count: u32,
}

impl End {
    /// At most 56 bits.
    ///
    /// # Safety
    /// There is room for them: `BitWriter::extend` was told of them.
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

/// Takes from the front of a slice.
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

    /// At most `limit`.
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

    /// The bytes of a plane of `bits` bits.
    pub fn plane(&mut self, bits: u64) -> Result<&'a [u8], Refused> {
        if bits > 8 * self.0.len() as u64 {
            return Err("a plane is longer than its tile");
        }
        self.take(bits.div_ceil(8) as usize)
    }
}

/// A plane of bits: `bits` of them from `start`, followed by at least `PADDING` readable bytes.
#[derive(Clone, Copy)]
pub struct Plane {
    start: *const u8,
    bits: u64,
}

/// Readable bytes that must lie behind every plane.
pub const PADDING: usize = 16;

impl Plane {
    /// # Safety
    /// `PADDING` bytes behind the plane's are readable, for as long as the plane is used.
    pub unsafe fn new(bytes: &[u8], bits: u64) -> Self {
        debug_assert!(bits.div_ceil(8) as usize <= bytes.len());
        Self { start: bytes.as_ptr(), bits }
    }

    /// 57 bits and more from bit `at` on, which is at most the plane's length.
    #[inline(always)]
    fn word(self, at: u64) -> u64 {
        debug_assert!(at <= self.bits);
        u64::from_le_bytes(unsafe { self.start.add((at >> 3) as usize).cast::<[u8; 8]>().read() })
    }
}

/// Reads fixed widths of bits from a plane that was checked to hold as many as are read.
pub struct LowBits {
    plane: Plane,
    at: u64,
}

impl LowBits {
    pub fn new(plane: Plane) -> Self {
        Self { plane, at: 0 }
    }

    /// `width` ≤ 32 bits.
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

    /// The 64 bits from `base` on, without those behind the plane.
    #[inline(always)]
    fn load(&self) -> u64 {
        let left = self.plane.bits - self.base;
        let word = self.plane.word(self.base);
        if left >= 64 { word } else { word & ((1 << left) - 1) }
    }

    /// `count` quotients into `out`, each ≤ `CAP`.
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

    /// Refuses where anything but the last number's one ends the plane.
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
