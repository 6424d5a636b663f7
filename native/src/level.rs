//! Compiles the generic code once per instruction level, and dispatches to it.

use crate::bits::Refused;
use crate::decode::{Decoder, Sink};
use crate::encode::Encoder;
use crate::kind::Code;
#[cfg(target_arch = "x86_64")]
use crate::scan::{Avx2, Avx512};
use crate::scan::{Classes, Level, Portable, Scan};
use crate::tile::Piece;

/// # Safety
/// As `Encoder::encode`; the machine has the level.
pub unsafe fn encode<T: Code>(
    level: Level,
    encoder: &mut Encoder<T>,
    classes: Classes,
    pieces: &[Piece<T>],
) -> Vec<u8> {
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => encode_avx512(encoder, classes, pieces),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => encode_avx2(encoder, classes, pieces),
            _ => encoder.encode::<Portable>(classes, pieces),
        }
    }
}

/// # Safety
/// As `Decoder::decode`; the machine has the level.
pub unsafe fn decode<T: Code>(
    level: Level,
    decoder: &mut Decoder,
    classes: Classes,
    pieces: &[Piece<T>],
    coded: &[u8],
    sink: &mut impl Sink<T>,
) -> Result<(), Refused> {
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => decode_avx512(decoder, classes, pieces, coded, sink),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => decode_avx2(decoder, classes, pieces, coded, sink),
            _ => decoder.decode::<T, Portable, _>(classes, pieces, coded, sink),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
unsafe fn encode_avx512<T: Code>(encoder: &mut Encoder<T>, classes: Classes, pieces: &[Piece<T>]) -> Vec<u8> {
    unsafe { encoder.encode::<Avx512>(classes, pieces) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
unsafe fn encode_avx2<T: Code>(encoder: &mut Encoder<T>, classes: Classes, pieces: &[Piece<T>]) -> Vec<u8> {
    unsafe { encoder.encode::<Avx2>(classes, pieces) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
unsafe fn decode_avx512<T: Code>(
    decoder: &mut Decoder,
    classes: Classes,
    pieces: &[Piece<T>],
    coded: &[u8],
    sink: &mut impl Sink<T>,
) -> Result<(), Refused> {
    unsafe { decoder.decode::<T, Avx512, _>(classes, pieces, coded, sink) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
unsafe fn decode_avx2<T: Code>(
    decoder: &mut Decoder,
    classes: Classes,
    pieces: &[Piece<T>],
    coded: &[u8],
    sink: &mut impl Sink<T>,
) -> Result<(), Refused> {
    unsafe { decoder.decode::<T, Avx2, _>(classes, pieces, coded, sink) }
}

/// # Safety
/// The machine has the level.
pub unsafe fn count_changed<T: Code>(level: Level, old: &[T], new: &[T]) -> u64 {
    #[inline(always)]
    fn count<T: Code>(old: &[T], new: &[T]) -> u64 {
        let some = |(a, b): (&[T], &[T])| a.iter().zip(b).map(|(a, b)| (a != b) as u8).sum::<u8>() as u64;
        old.chunks(128).zip(new.chunks(128)).map(some).sum()
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,popcnt")]
    unsafe fn wide<T: Code>(old: &[T], new: &[T]) -> u64 {
        count(old, new)
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,popcnt")]
    unsafe fn half<T: Code>(old: &[T], new: &[T]) -> u64 {
        count(old, new)
    }
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_unsafe))]
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => wide(old, new),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => half(old, new),
            _ => count(old, new),
        }
    }
}

/// Dispatches `checksum::of_words`.
///
/// # Safety
/// As there; the machine has the level.
pub unsafe fn sums(level: Level, words: *const u64, first: usize, count: usize) -> [u64; 2] {
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_unsafe))]
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Avx512::sums(words, first, count),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Avx2::sums(words, first, count),
            _ => Portable::sums(words, first, count),
        }
    }
}
