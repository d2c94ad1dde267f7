//! Events, to time work on a stream.
//!
//! The invariant: an event is never waited for unless it is asked to be, so that recording one leaves a stream as it
//! flows. cudarc's own events leave out the timing by default, which these are for.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};

use crate::error::Error;
use crate::launch::failed;

/// A point in a stream, to time what lies between two of them.
#[derive(Debug)]
pub struct Event {
    event: CudaEvent,
}

impl Event {
    /// An event that is nowhere yet.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
        let event = context
            .new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
            .map_err(|error| failed("cuEventCreate", "an event", error))?;
        Ok(Self { event })
    }

    /// Puts the event behind the work that the stream has been given so far.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn record(&self, stream: &CudaStream) -> Result<(), Error> {
        self.event.record(stream).map_err(|error| failed("cuEventRecord", "an event", error))
    }

    /// Waits until the stream has reached the event.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn synchronize(&self) -> Result<(), Error> {
        self.event.synchronize().map_err(|error| failed("cuEventSynchronize", "an event", error))
    }

    /// Milliseconds from this event to `end`; waits for both.
    ///
    /// # Errors
    /// [`Error::Driver`], also when either was never recorded.
    pub fn elapsed_ms(&self, end: &Self) -> Result<f32, Error> {
        self.event
            .elapsed_ms(&end.event)
            .map_err(|error| failed("cuEventElapsedTime", "two events", error))
    }
}
