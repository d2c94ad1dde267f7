//! One kernel instance: which entry, with which macros, for which processor.
//!
//! The invariant: equal specs compile to equal code, so a spec can be a key of every cache. Macros are
//! sorted names with integer values rather than text: a macro that is code could not be compared,
//! nor printed on one line of a report.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// A kernel of the `cuda/` tree: one file with one entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Entry {
    /// One thread block a row, in f32: accepts every problem, and is the oracle on the device.
    Naive,
    /// Tiled forward over many query rows.
    Prefill,
    /// The same on Hopper's own instructions.
    PrefillSm90a,
    /// Few query rows over a long cache, split by keys.
    Decode,
    /// The same with clusters, which Hopper has.
    DecodeSm90a,
    /// Few query rows over a cache of latent rows, each of them key and value, on Hopper.
    LatentSm90a,
    /// Joins the parts that a launch before left of its rows.
    MergeParts,
    /// Merges pairs of output and log-sum-exp.
    MergeStates,
    /// Scatters new keys and values into pages.
    AppendKv,
    /// Copies pages of a cache.
    CopyBlocks,
    /// What a backward needs of each query row, and its sums made 0.
    BackwardPrepare,
    /// Tiled gradients of keys and values, and sums of those of queries.
    Backward,
    /// The same on Hopper's own instructions.
    BackwardSm90a,
    /// The sums of the queries' gradient, scaled and rounded.
    BackwardFinish,
    /// Gradients by the definition: accepts every problem that has any.
    BackwardNaive,
}

impl Entry {
    /// Every entry.
    pub const ALL: [Self; 15] = [
        Self::Naive,
        Self::Prefill,
        Self::PrefillSm90a,
        Self::Decode,
        Self::DecodeSm90a,
        Self::LatentSm90a,
        Self::MergeParts,
        Self::MergeStates,
        Self::AppendKv,
        Self::CopyBlocks,
        Self::BackwardPrepare,
        Self::Backward,
        Self::BackwardSm90a,
        Self::BackwardFinish,
        Self::BackwardNaive,
    ];

    /// The name in reports: `merge_states`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Prefill => "prefill",
            Self::PrefillSm90a => "prefill_sm90a",
            Self::Decode => "decode",
            Self::DecodeSm90a => "decode_sm90a",
            Self::LatentSm90a => "latent_sm90a",
            Self::MergeParts => "merge_parts",
            Self::MergeStates => "merge_states",
            Self::AppendKv => "append_kv",
            Self::CopyBlocks => "copy_blocks",
            Self::BackwardPrepare => "backward_prepare",
            Self::Backward => "backward",
            Self::BackwardSm90a => "backward_sm90a",
            Self::BackwardFinish => "backward_finish",
            Self::BackwardNaive => "backward_naive",
        }
    }

    /// The name of the function in the compiled module: `attn_merge_states`.
    #[must_use]
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Naive => "attn_naive",
            Self::Prefill => "attn_prefill",
            Self::PrefillSm90a => "attn_prefill_sm90a",
            Self::Decode => "attn_decode",
            Self::DecodeSm90a => "attn_decode_sm90a",
            Self::LatentSm90a => "attn_latent_sm90a",
            Self::MergeParts => "attn_merge_parts",
            Self::MergeStates => "attn_merge_states",
            Self::AppendKv => "attn_append_kv",
            Self::CopyBlocks => "attn_copy_blocks",
            Self::BackwardPrepare => "attn_backward_prepare",
            Self::Backward => "attn_backward",
            Self::BackwardSm90a => "attn_backward_sm90a",
            Self::BackwardFinish => "attn_backward_finish",
            Self::BackwardNaive => "attn_backward_naive",
        }
    }

    /// Whether code of this arch can hold the kernel.
    #[must_use]
    pub fn compiles_for(self, arch: &Arch) -> bool {
        let is_of_hopper = matches!(
            self,
            Self::PrefillSm90a | Self::DecodeSm90a | Self::LatentSm90a | Self::BackwardSm90a
        );
        !is_of_hopper || arch.name() == "sm_90a"
    }

    /// Its file in the source tree: `kernel/merge_states.cu`.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::Naive => "kernel/naive.cu",
            Self::Prefill => "kernel/prefill.cu",
            Self::PrefillSm90a => "kernel/prefill_sm90a.cu",
            Self::Decode => "kernel/decode.cu",
            Self::DecodeSm90a => "kernel/decode_sm90a.cu",
            Self::LatentSm90a => "kernel/latent_sm90a.cu",
            Self::MergeParts => "kernel/merge_parts.cu",
            Self::MergeStates => "kernel/merge_states.cu",
            Self::AppendKv => "kernel/append_kv.cu",
            Self::CopyBlocks => "kernel/copy_blocks.cu",
            Self::BackwardPrepare => "kernel/backward_prepare.cu",
            Self::Backward => "kernel/backward.cu",
            Self::BackwardSm90a => "kernel/backward_sm90a.cu",
            Self::BackwardFinish => "kernel/backward_finish.cu",
            Self::BackwardNaive => "kernel/backward_naive.cu",
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An entry and the macros that specialise it. Displayed as `prefill[block_n=64,head_dim=128]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelSpec {
    entry: Entry,
    /// Sorted by name, each name once.
    defines: Vec<(&'static str, i64)>,
}

impl KernelSpec {
    /// A spec. The macro `block_n` is seen by the sources as `ATTN_BLOCK_N`; order does not matter, and
    /// of two values for one name the last counts.
    pub fn new(entry: Entry, defines: impl IntoIterator<Item = (&'static str, i64)>) -> Self {
        let sorted: BTreeMap<_, _> = defines.into_iter().collect();
        Self { entry, defines: sorted.into_iter().collect() }
    }

    /// The kernel.
    #[must_use]
    pub fn entry(&self) -> Entry {
        self.entry
    }

    /// Names and values of the macros, sorted by name.
    #[must_use]
    pub fn defines(&self) -> &[(&'static str, i64)] {
        &self.defines
    }

    /// The value of one macro.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<i64> {
        self.defines.iter().find(|(n, _)| *n == name).map(|&(_, value)| value)
    }

    /// The macros on one line: `block_n=64,head_dim=128`, empty without macros.
    #[must_use]
    pub fn variant(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.defines {
            let comma = if text.is_empty() { "" } else { "," };
            text += &format!("{comma}{name}={value}");
        }
        text
    }
}

impl fmt::Display for KernelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.entry, self.variant())
    }
}

/// A processor that code is compiled for, always a real one: `sm_80`, `sm_90a`.
///
/// `compute_80` would be PTX, which the driver compiles again, if it is new enough to read it at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    major: u32,
    minor: u32,
    /// Code that uses what this one processor has, and runs on no other.
    specific: bool,
}

impl Arch {
    /// The oldest compute capability that the kernels run on: `mma.sync` on bf16 and `cp.async`.
    pub const OLDEST: (u32, u32) = (8, 0);

    /// The target for a device of this compute capability: `(9, 0)` gives `sm_90a`. From 9.0 on that is
    /// the arch-specific one, without which neither `wgmma` nor `tcgen05` can be used.
    ///
    /// # Errors
    /// [`Error::Arch`] below 8.0.
    pub fn from_compute(compute: (u32, u32)) -> Result<Self, Error> {
        let (major, minor) = compute;
        Self { major, minor, specific: major >= 9 }.supported()
    }

    /// The name that the compiler takes: `sm_90a`.
    #[must_use]
    pub fn name(&self) -> String {
        self.to_string()
    }

    /// The compute capability, major and minor.
    #[must_use]
    pub fn compute(&self) -> (u32, u32) {
        (self.major, self.minor)
    }

    /// True if code for `self` runs on a device whose own target is `device`: code for `sm_80` runs on
    /// `sm_86`, never the other way round, and `sm_90a` runs on nothing else.
    #[must_use]
    pub fn runs_on(&self, device: &Self) -> bool {
        if self.specific {
            return self == device;
        }
        self.major == device.major && self.minor <= device.minor
    }

    fn supported(self) -> Result<Self, Error> {
        if self.compute() < Self::OLDEST || self.minor > 9 {
            return Err(Error::Arch { got: self.to_string() });
        }
        Ok(self)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.specific { "a" } else { "" };
        write!(f, "sm_{}{}{suffix}", self.major, self.minor)
    }
}

impl FromStr for Arch {
    type Err = Error;

    /// Reads `sm_80` or `sm_90a`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = || Error::Arch { got: text.to_owned() };
        let digits = text.strip_prefix("sm_").ok_or_else(refused)?;
        let (digits, specific) = match digits.strip_suffix('a') {
            Some(digits) => (digits, true),
            None => (digits, false),
        };
        if !(2..=3).contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(refused());
        }
        let number: u32 = digits.parse().map_err(|_| refused())?;
        Self { major: number / 10, minor: number % 10, specific }.supported()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_named_after_their_files() {
        for entry in Entry::ALL {
            assert_eq!(entry.file(), format!("kernel/{}.cu", entry.name()));
            assert_eq!(entry.symbol(), format!("attn_{}", entry.name()));
        }
    }

    #[test]
    fn spec_sorts_its_macros_and_keeps_the_last_of_a_name() {
        let spec =
            KernelSpec::new(Entry::Prefill, [("dtype", 2), ("block_n", 32), ("block_n", 64)]);
        assert_eq!(spec.to_string(), "prefill[block_n=64,dtype=2]");
        let same = KernelSpec::new(Entry::Prefill, [("block_n", 64), ("dtype", 2)]);
        assert_eq!(spec, same);
        assert_eq!((spec.get("dtype"), spec.get("bias")), (Some(2), None));
        assert_eq!(KernelSpec::new(Entry::CopyBlocks, []).to_string(), "copy_blocks[]");
    }

    #[test]
    fn arch_follows_the_compute_capability() {
        for (compute, name) in [
            ((8, 0), "sm_80"),
            ((8, 6), "sm_86"),
            ((8, 9), "sm_89"),
            ((9, 0), "sm_90a"),
            ((10, 0), "sm_100a"),
            ((10, 3), "sm_103a"),
            ((12, 0), "sm_120a"),
        ] {
            let arch = Arch::from_compute(compute).unwrap();
            assert_eq!(arch.name(), name);
            assert_eq!(name.parse::<Arch>().unwrap(), arch);
            assert_eq!(arch.compute(), compute);
        }
    }

    #[test]
    fn arch_refuses_old_and_virtual_ones() {
        for text in
            ["sm_75", "sm_7", "compute_80", "sm_", "sm_9a0", "sm_+80", "sm_1000", "SM_80", ""]
        {
            let error = text.parse::<Arch>().unwrap_err();
            assert!(error.to_string().contains("sm_80"), "{error}");
        }
        assert!(Arch::from_compute((7, 5)).is_err());
        assert!(Arch::from_compute((u32::MAX, u32::MAX)).is_err());
    }

    #[test]
    fn arch_runs_on_its_like_and_on_newer_minors() {
        let arch = |name: &str| name.parse::<Arch>().unwrap();
        for (code, device, runs) in [
            ("sm_80", "sm_80", true),
            ("sm_80", "sm_89", true),
            ("sm_86", "sm_80", false),
            ("sm_80", "sm_90a", false),
            ("sm_90", "sm_90a", true),
            ("sm_90a", "sm_90a", true),
            ("sm_100a", "sm_103a", false),
        ] {
            assert_eq!(arch(code).runs_on(&arch(device)), runs, "{code} on {device}");
        }
    }
}
