//! Writes codes to positions in live memory. The engine is paused for it. By default it uses one thread: memory
//! bandwidth is the limit, and on a busy machine the pause would wait for the other threads to be scheduled.

use std::ffi::c_void;

use crate::threads;

/// Distance, in writes, at which memory is prefetched: positions ascend, but are too far apart for the hardware
/// prefetcher.
const AHEAD: usize = 24;
/// Changes that a thread writes at a time, if there are several threads.
const PART: usize = 1 << 14;

/// `count` codes of `width` bytes (1, 2, 4 or 8) to write to `places` of memory of `len` codes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawScatter {
    pub to: *mut c_void,
    pub len: u64,
    pub places: *const u32,
    pub codes: *const c_void,
    pub count: u64,
    pub width: u64,
}

unsafe impl Sync for RawScatter {}

/// Write all rows. Returns whether every position was in range; writing stops at one that is not.
///
/// # Safety
/// Each row describes existing memory, aligned to its width; with several threads, no two rows refer to the same
/// memory.
pub unsafe fn scatter(rows: &[RawScatter], threads: usize) -> bool {
    if threads < 2 {
        return rows.iter().all(|row| unsafe { scatter_one(row) });
    }
    let parts: Vec<(usize, usize)> = rows
        .iter()
        .enumerate()
        .flat_map(|(i, row)| (0..row.count as usize).step_by(PART).map(move |from| (i, from)))
        .collect();
    let inside = threads::over(
        threads,
        parts.len(),
        || (),
        |(), i| {
            let (i, from) = parts[i];
            let row = rows[i];
            let part = RawScatter {
                places: row.places.wrapping_add(from),
                codes: row.codes.wrapping_byte_add(from * row.width as usize),
                count: (row.count - from as u64).min(PART as u64),
                ..row
            };
            unsafe { scatter_one(&part) }
        },
    );
    inside.into_iter().all(|inside| inside)
}

unsafe fn scatter_one(row: &RawScatter) -> bool {
    unsafe {
        match row.width {
            _ if row.count == 0 => true,
            1 => write::<u8>(row),
            2 => write::<u16>(row),
            4 => write::<u32>(row),
            8 => write::<u64>(row),
            _ => false,
        }
    }
}

unsafe fn write<T: Copy>(row: &RawScatter) -> bool {
    let count = row.count as usize;
    let (places, codes) = unsafe {
        (std::slice::from_raw_parts(row.places, count), std::slice::from_raw_parts(row.codes.cast::<T>(), count))
    };
    let to = row.to.cast::<T>();
    for (i, (&place, &code)) in places.iter().zip(codes).enumerate() {
        if let Some(&next) = places.get(i + AHEAD) {
            fetch(to.wrapping_add(next as usize));
        }
        if place as u64 >= row.len {
            return false;
        }
        unsafe { *to.add(place as usize) = code };
    }
    true
}

/// Prefetch a cache line. Any address is allowed.
#[inline(always)]
fn fetch<T>(at: *mut T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row<T>(to: &mut [T], places: &[u32], codes: &[T]) -> RawScatter {
        RawScatter {
            to: to.as_mut_ptr().cast(),
            len: to.len() as u64,
            places: places.as_ptr(),
            codes: codes.as_ptr().cast(),
            count: places.len() as u64,
            width: size_of::<T>() as u64,
        }
    }

    #[test]
    fn each_code_goes_to_its_place() {
        let places: Vec<u32> = (0..3 * AHEAD as u32).map(|i| i * 5 + 1).collect();
        let codes: Vec<u16> = (0..places.len()).map(|i| i as u16 ^ 0x5555).collect();
        let (few, eights) = ([0u32, 2], [u64::MAX, 7]);
        let (mut to, mut other) = (vec![9u16; 15 * AHEAD + 1], [1u64, 2, 3]);
        let mut expected = to.clone();
        places.iter().zip(&codes).for_each(|(&place, &code)| expected[place as usize] = code);
        let rows = [row(&mut to, &places, &codes), row(&mut other, &few, &eights)];
        assert!(unsafe { scatter(&rows, 1) });
        assert!(to == expected && other == [u64::MAX, 2, 7]);
    }

    #[test]
    fn nothing_is_written_outside() {
        let mut to = [1u8, 2, 3, 4];
        let inside = row(&mut to[..3], &[0, 3], &[9, 9]);
        assert!(!unsafe { scatter(&[inside], 1) });
        assert_eq!(to, [9, 2, 3, 4]);
    }

    #[test]
    fn several_threads_write_what_one_does() {
        let places: Vec<u32> = (0..3 * PART as u32 + 5).map(|i| i * 3).collect();
        let codes: Vec<u32> = (0..places.len() as u32).map(|i| i ^ 0x1234_5678).collect();
        let mut both = [vec![7u32; 9 * PART + 15], vec![7u32; 9 * PART + 15]];
        for (threads, to) in (1..).zip(&mut both) {
            let mut few = [0u8; 4];
            let rows = [row(to, &places, &codes), row(&mut few, &[1, 3], &[5, 6]), row(&mut [0u16; 1], &[], &[])];
            assert!(unsafe { scatter(&rows, threads) });
            assert_eq!(few, [0, 5, 0, 6]);
        }
        assert!(both[0] == both[1] && both[0].contains(&0x1234_5678));
        let outside = row(&mut both[0][..9 * PART], &places, &codes);
        assert!(!unsafe { scatter(&[outside], 2) });
    }
}
