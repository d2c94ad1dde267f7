//! The clocks of a worker: the same protocol as the peers', step by step.
//!
//! The invariant: a contestant is timed exactly as `peers.py`'s `bench` and `latency` time theirs: warm-ups,
//! estimates, the choice between a captured graph and single events, repetitions, idle time before, the
//! median. A better method of our own would not be comparable with theirs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use attn_kernels::Error;
use attn_kernels::cuda::{CudaEngine, CudaStream, Event};
use serde::Serialize;

/// Idle seconds and timed milliseconds, as the parent of the workers sets them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pace {
    rest: Duration,
    target_ms: f64,
}

impl Pace {
    /// From `PEERS_REST` and `PEERS_TARGET_MS`.
    pub(crate) fn from_env() -> Self {
        let number = |name: &str, default: f64| {
            let text = std::env::var(name).ok();
            text.and_then(|text| text.trim().parse().ok()).unwrap_or(default)
        };
        let rest = Duration::try_from_secs_f64(number("PEERS_REST", 0.0)).unwrap_or_default();
        Self { rest, target_ms: number("PEERS_TARGET_MS", 60.0) }
    }
}

/// Times of one contestant on one case.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Times {
    /// Median, milliseconds a call.
    pub(crate) ms: f64,
    ms_min: f64,
    p95_ms: f64,
    /// Calls timed.
    n: usize,
    pub(crate) method: &'static str,
    /// Host and device together, launched one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    eager_us: Option<f64>,
    /// Host alone, a call.
    host_us: f64,
}

/// Times of a call that is all latency, microseconds a call.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Latency {
    pub(crate) ms: f64,
    eager_us: f64,
    host_us: f64,
    sync_us: f64,
    graph1_us: f64,
    graph50_us: f64,
    method: &'static str,
}

/// A call, by the number of the buffers that it rotates through.
pub(crate) type Call<'c> = &'c mut dyn FnMut(usize) -> Result<(), Error>;

/// Times calls on one stream.
#[derive(Debug)]
pub(crate) struct Clock<'a> {
    pub(crate) engine: &'a CudaEngine,
    pub(crate) stream: &'a Arc<CudaStream>,
    pub(crate) pace: Pace,
}

impl Clock<'_> {
    /// Median time of a call that rotates through `rotations` sets of buffers.
    ///
    /// # Errors
    /// A launch, a capture or the device that fails.
    pub(crate) fn bench(
        &self,
        call: Call<'_>,
        rotations: usize,
        eager: bool,
    ) -> Result<Times, Error> {
        let rotations = rotations.max(1);
        call(0)?;
        call(0)?;
        for n in 0..rotations {
            call(n)?;
        }
        self.wait()?;
        let few = rotations.clamp(3, 20);
        let estimate =
            self.between(|| (0..few).try_for_each(|n| call(n % rotations)))? / to_f64(few);
        let host_us = self.host_us(call, rotations, estimate)?;
        let eager_us = if eager { Some(self.eager_us(call, rotations, estimate)?) } else { None };
        let times = if estimate < 1.0 {
            self.by_graph(call, rotations, estimate)?
        } else {
            self.by_event(call, rotations, estimate)?
        };
        Ok(Times { eager_us, host_us, ..times })
    }

    /// Median time of a call whose launches are never captured.
    ///
    /// # Errors
    /// As [`Clock::bench`].
    pub(crate) fn bench_by_event(&self, call: Call<'_>) -> Result<Times, Error> {
        for _ in 0..3 {
            call(0)?;
        }
        self.wait()?;
        let estimate = self.between(|| (0..3).try_for_each(|_| call(0)))? / 3.0;
        let host_us = self.host_us(call, 1, estimate)?;
        Ok(Times { host_us, ..self.by_event(call, 1, estimate)? })
    }

    fn by_graph(&self, call: Call<'_>, rotations: usize, estimate: f64) -> Result<Times, Error> {
        let n = to_count(2.0 / estimate.max(0.004)).min(100).max(rotations).max(4);
        let n = n.next_multiple_of(rotations);
        let graph =
            self.engine.capture(self.stream, || (0..n).try_for_each(|at| call(at % rotations)))?;
        let replay = || graph.launch(self.stream);
        replay()?;
        replay()?;
        self.wait()?;
        let each = self.between(replay)?.max(1e-3);
        let repeats = to_count(self.pace.target_ms / each).clamp(5, 60);
        if !self.pace.rest.is_zero() {
            std::thread::sleep(self.pace.rest);
            replay()?;
        }
        let times = self.each(repeats, |_| replay())?;
        let times = times.into_iter().map(|ms| ms / to_f64(n)).collect();
        Ok(Times { n: repeats * n, method: "graph", ..summary(times) })
    }

    fn by_event(&self, call: Call<'_>, rotations: usize, estimate: f64) -> Result<Times, Error> {
        let least = if self.pace.rest.is_zero() { 8 } else { 3 };
        let repeats = to_count(self.pace.target_ms / estimate.max(1e-3)).min(100).max(least);
        std::thread::sleep(self.pace.rest);
        for n in 0..if self.pace.rest.is_zero() { 3 } else { 1 } {
            call(n % rotations)?;
        }
        let times = self.each(repeats, |n| call(n % rotations))?;
        Ok(Times { n: repeats, method: "event", ..summary(times) })
    }

    /// Every way to look at the time of a short call.
    ///
    /// # Errors
    /// As [`Clock::bench`].
    pub(crate) fn latency(&self, call: Call<'_>) -> Result<Latency, Error> {
        const CALLS: usize = 200;
        for _ in 0..30 {
            call(0)?;
        }
        self.wait()?;
        let mut rounds = Vec::new();
        for _ in 0..5 {
            let start = Instant::now();
            for _ in 0..CALLS {
                call(0)?;
            }
            let launched = micros(start) / to_f64(CALLS);
            self.wait()?;
            rounds.push((micros(start) / to_f64(CALLS), launched));
        }
        rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (eager_us, host_us) = rounds[rounds.len() / 2];
        let mut single = Vec::new();
        for _ in 0..100 {
            let start = Instant::now();
            call(0)?;
            self.wait()?;
            single.push(micros(start));
        }
        let graph1_us = self.replay_us(call, 1)?;
        let graph50_us = self.replay_us(call, 50)?;
        Ok(Latency {
            ms: graph50_us / 1e3,
            eager_us,
            host_us,
            sync_us: median(single),
            graph1_us,
            graph50_us,
            method: "latency",
        })
    }

    /// Wall time a call of a graph of `n` calls.
    fn replay_us(&self, call: Call<'_>, n: usize) -> Result<f64, Error> {
        let graph = self.engine.capture(self.stream, || (0..n).try_for_each(|_| call(0)))?;
        for _ in 0..5 {
            graph.launch(self.stream)?;
        }
        self.wait()?;
        let repeats = 500 / n + 10;
        let mut times = Vec::new();
        for _ in 0..5 {
            let start = Instant::now();
            for _ in 0..repeats {
                graph.launch(self.stream)?;
            }
            self.wait()?;
            times.push(micros(start) / to_f64(repeats) / to_f64(n));
        }
        Ok(median(times))
    }

    /// What a call costs its caller while the device is behind.
    fn host_us(&self, call: Call<'_>, rotations: usize, estimate: f64) -> Result<f64, Error> {
        // Few enough that the queue of launches does not fill up, which would make the caller wait.
        let calls = to_count(20.0 / estimate.max(1e-3)).clamp(3, 200);
        let start = Instant::now();
        for n in 0..calls {
            call(n % rotations)?;
        }
        let launched = micros(start) / to_f64(calls);
        self.wait()?;
        Ok(launched)
    }

    fn eager_us(&self, call: Call<'_>, rotations: usize, estimate: f64) -> Result<f64, Error> {
        let calls = to_count(40.0 / estimate.max(1e-3)).clamp(50, 300);
        let start = Instant::now();
        for n in 0..calls {
            call(n % rotations)?;
        }
        self.wait()?;
        Ok(micros(start) / to_f64(calls))
    }

    /// Milliseconds between events around some work.
    fn between(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
        let (start, end) = (self.event()?, self.event()?);
        start.record(self.stream)?;
        work()?;
        end.record(self.stream)?;
        Ok(f64::from(start.elapsed_ms(&end)?))
    }

    /// Milliseconds of each of some calls, all launched before any is waited for.
    fn each(
        &self,
        repeats: usize,
        mut work: impl FnMut(usize) -> Result<(), Error>,
    ) -> Result<Vec<f64>, Error> {
        let events = (0..repeats)
            .map(|_| Ok((self.event()?, self.event()?)))
            .collect::<Result<Vec<_>, Error>>()?;
        for (n, (start, end)) in events.iter().enumerate() {
            start.record(self.stream)?;
            work(n)?;
            end.record(self.stream)?;
        }
        self.wait()?;
        events.iter().map(|(start, end)| Ok(f64::from(start.elapsed_ms(end)?))).collect()
    }

    fn event(&self) -> Result<Event, Error> {
        Event::new(self.engine.context())
    }

    /// Waits until the stream is idle.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        let event = self.event()?;
        event.record(self.stream)?;
        event.synchronize()
    }
}

/// Median, least and 95th percentile; the rest is the caller's.
fn summary(mut times: Vec<f64>) -> Times {
    times.sort_by(f64::total_cmp);
    let at = |place: usize| times.get(place.min(times.len().saturating_sub(1))).copied();
    Times {
        ms: at(times.len() / 2).unwrap_or(f64::NAN),
        ms_min: at(0).unwrap_or(f64::NAN),
        p95_ms: at((times.len() * 95).div_ceil(100).saturating_sub(1)).unwrap_or(f64::NAN),
        ..Times::default()
    }
}

fn median(times: Vec<f64>) -> f64 {
    summary(times).ms
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

fn to_f64(count: usize) -> f64 {
    count as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
fn to_count(x: f64) -> usize {
    x as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_takes_the_places_that_the_peers_take() {
        let times: Vec<f64> = (0..20).rev().map(f64::from).collect();
        let got = summary(times);
        assert_eq!((got.ms, got.ms_min, got.p95_ms), (10.0, 0.0, 18.0));
        assert_eq!(summary(vec![3.0]).p95_ms, 3.0);
        assert!(summary(Vec::new()).ms.is_nan());
    }

    #[test]
    fn counts_saturate() {
        assert_eq!((to_count(-1.0), to_count(2.9), to_count(f64::NAN)), (0, 2, 0));
        assert_eq!(to_count(f64::INFINITY), usize::MAX);
    }
}
