//! Distributes tiles over threads: each thread takes the next tile until there is none.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Call `work(state, i)` for each `i` below `count`; the results are in order of `i`. Every thread creates its own
/// state with `make`.
pub fn over<S, R: Send>(
    threads: usize,
    count: usize,
    make: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> R + Sync,
) -> Vec<R> {
    let threads = threads.clamp(1, count.max(1));
    if threads == 1 {
        let mut state = make();
        return (0..count).map(|i| work(&mut state, i)).collect();
    }
    let next = AtomicUsize::new(0);
    let one = || {
        let mut state = make();
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return done;
            }
            done.push((i, work(&mut state, i)));
        }
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
        let mut all = one();
        for other in others {
            all.extend(other.join().expect("a thread ended by a panic"));
        }
        all
    });
    all.sort_unstable_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, result)| result).collect()
}
