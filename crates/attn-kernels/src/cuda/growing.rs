//! Decode launches whose sequences grow: one launch, and so one captured graph, for all lengths up to a stated one.
//!
//! The invariant: what a length decides is in a table on the device and nowhere in the launch. The keys of every sequence are
//! in a fixed number of parts, of which the last may be empty, so that grid and partial results are those of the longest
//! lengths. The table is the launch's own: no other plan's lengths are ever written there.

use std::sync::Arc;

use attn_core::{Family, KvStorage, Plan};
use cudarc::driver::CudaStream;

use super::call::{Inputs, Outputs};
use super::engine::{Built, CudaEngine, launch_forward};
use super::step::{self, NewRows, Pages};
use super::workspace::{Prepared, Workspace};
use crate::error::Error;
use crate::launch::{self, check_context};

/// A plan whose sequences may have any number of keys up to those that its problem states.
///
/// Made by [`CudaEngine::growing`], with the lengths of the plan's problem; run by [`CudaEngine::forward_growing`], in captures
/// too. A graph that was captured with it runs with the lengths that [`Growing::set_lengths`] stated last.
#[derive(Debug)]
pub struct Growing {
    plan: Plan,
    prepared: Prepared,
    /// Where the prefix sums of the keys are, in bytes.
    keys_at: usize,
    stream: Arc<CudaStream>,
    /// Bytes of partial results and of counters.
    needs: [usize; 2],
}

impl Growing {
    /// The plan, whose lengths are the longest ones.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// States the keys of each sequence, in stream order: launches and replays on the stream from here on have them.
    ///
    /// # Errors
    /// [`Error::Call`] for another number of sequences than the plan's, or more keys than its problem states for one;
    /// [`Error::Workspace`] on another stream, or during a capture; [`Error::Driver`]. The lengths are as they were then.
    pub fn set_lengths(&mut self, kv_lens: &[usize], stream: &CudaStream) -> Result<(), Error> {
        self.check_stream(stream)?;
        let lengths = self.plan.problem.lengths();
        if kv_lens.len() != lengths.batch() {
            let expected = format!("{} sequences", lengths.batch());
            return Err(attn_core::Error::invalid("kv_lens", expected, kv_lens.len()).into());
        }
        let mut starts = Vec::with_capacity(kv_lens.len() + 1);
        let mut start = 0i64;
        starts.push(start);
        for (sequence, &keys) in kv_lens.iter().enumerate() {
            if keys > lengths.kv(sequence) {
                let expected =
                    format!("at most {} keys in sequence {sequence}", lengths.kv(sequence));
                return Err(attn_core::Error::invalid("kv_lens", expected, keys).into());
            }
            // Sums of what the plan's own lengths, which are longer, were summed to.
            start += keys as i64;
            starts.push(start);
        }
        if launch::is_capturing(stream)? {
            let (expected, got) = ("lengths that are stated outside a capture", "a capture");
            return Err(Error::Workspace { expected, got: got.to_owned() });
        }
        self.prepared.lengths.upload_at(stream, self.keys_at, bytemuck::cast_slice(&starts))
    }

    fn check_stream(&self, stream: &CudaStream) -> Result<(), Error> {
        check_context(self.stream.context(), stream.context())?;
        if self.stream.cu_stream() == stream.cu_stream() {
            return Ok(());
        }
        let got = "another stream: make a growing plan for each".to_owned();
        Err(Error::Workspace { expected: "the stream it was made on", got })
    }
}

impl CudaEngine {
    /// Prepares a decode plan over pages for lengths that grow, up to those of its problem, which it begins with.
    ///
    /// A sequence has as many parts as the longest one of the plan has, however short it is; clusters, which are for equal
    /// sequences, are not used.
    ///
    /// # Errors
    /// [`Error::Plan`] for a kernel of another family than decode, for which a problem can ask (`Options::phase`); [`Error::Call`] for keys that are not in pages, since other rows
    /// move when a sequence grows; else as [`CudaEngine::prepare`]. The workspace is as it was then.
    pub fn growing(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<Growing, Error> {
        self.check_new(plan, workspace, stream)?;
        if plan.family != Family::Decode {
            let got = format!("{} ({})", plan.kernel, plan.family);
            return Err(Error::Plan { expected: "a plan of a decode kernel", got });
        }
        if !matches!(plan.problem.kv(), KvStorage::Paged(_)) {
            return Err(attn_core::Error::invalid("kv", "pages", "rows in order").into());
        }
        let Built { prepared, partials, counters, tables, keys } =
            self.build(plan, workspace, stream, true)?;
        prepared.lengths.upload(stream, &tables)?;
        let needs = [&partials, &counters].map(|memory| memory.as_ref().map_or(0, |m| m.bytes()));
        workspace.take(stream, partials, counters);
        let keys_at = keys.map_or(0, |at| usize::try_from(at).unwrap_or(usize::MAX));
        Ok(Growing { plan: plan.clone(), prepared, keys_at, stream: Arc::clone(stream), needs })
    }

    /// Runs a growing plan with the lengths that were stated last, in stream order. Tensors are those of the plan's problem:
    /// the block table has columns for the longest lengths, of which a sequence's own keys are read.
    ///
    /// # Errors
    /// As [`CudaEngine::forward`], and [`Error::Workspace`] on another stream than the plan's or with a workspace that has no
    /// memory for it.
    pub fn forward_growing(
        &self,
        growing: &Growing,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        self.run_growing(growing, inputs, None, outputs, workspace, stream)
    }

    /// As [`CudaEngine::forward_growing`], with the last keys of each sequence written first, in the same launch: of the lengths
    /// that were stated last, which count them. A row without a key, of a sequence with more rows than keys, is not written.
    ///
    /// # Errors
    /// As [`CudaEngine::forward_append`] and [`CudaEngine::forward_growing`].
    pub fn forward_growing_append(
        &self,
        growing: &Growing,
        call: &Inputs<'_>,
        pages: &mut Pages<'_>,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let (new, inputs) = step::split(&growing.plan, call, pages)?;
        self.run_growing(growing, &inputs, Some(&new), outputs, workspace, stream)
    }

    fn run_growing(
        &self,
        growing: &Growing,
        inputs: &Inputs<'_>,
        new: Option<&NewRows<'_>>,
        outputs: &Outputs<'_>,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        growing.check_stream(stream)?;
        if self.check_call(&growing.plan, inputs, new, outputs, stream)? {
            return Ok(());
        }
        workspace.check_stream(stream)?;
        let ready = workspace.ready_for(&growing.prepared, growing.needs)?;
        launch_forward(&growing.plan.problem, inputs, outputs, new, ready, stream)
    }
}
