//! A device of the imagination, whose command buffers end when a test says so: what queue and launcher are tested on.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metaltail_device::residency::{DriverError, Limits, ResidencyDriver, SetId, Span};

use crate::dispatch::{Argument, Dispatch};
use crate::error::{COMMAND_BUFFER_DOMAIN, Failure, MetalError};
use crate::health::{Health, Use, Uses};
use crate::in_flight::{Command, InFlight, State};
use crate::launcher::{LaunchBackend, Memory};
use crate::queue::Backend;
use crate::times::Stamps;
use crate::wait::Latch;

pub(crate) const PAGE: usize = 16384;

pub(crate) fn span(page: usize) -> Span {
    Span { base: page * PAGE, len: PAGE }
}

/// Knows memory at its own address plus a gibibyte.
#[derive(Default)]
pub(crate) struct Driver {
    known: BTreeSet<Span>,
    declared: Vec<Span>,
}

impl ResidencyDriver for Driver {
    fn limits(&self) -> Limits {
        Limits { sets: 4, working_set: 1 << 30, setting: None, allocation: 1 << 30 }
    }
    fn now(&self) -> Duration {
        Duration::ZERO
    }
    fn wrap(&mut self, span: Span) -> Result<(), DriverError> {
        self.known.insert(span);
        Ok(())
    }
    fn unwrap(&mut self, span: Span) {
        self.known.remove(&span);
    }
    fn create_set(&mut self) -> Result<SetId, DriverError> {
        Ok(SetId(0))
    }
    fn add(&mut self, _: SetId, _: Span) -> Result<(), DriverError> {
        Ok(())
    }
    fn remove(&mut self, _: SetId, _: Span) -> Result<(), DriverError> {
        Ok(())
    }
    fn commit(&mut self, _: SetId) -> Result<(), DriverError> {
        Ok(())
    }
    fn request(&mut self, _: SetId) -> Result<(), DriverError> {
        Ok(())
    }
    fn release(&mut self, _: SetId) -> Result<(), DriverError> {
        Ok(())
    }
    fn declare(&mut self, spans: &[Span]) -> Result<(), DriverError> {
        self.declared = spans.to_vec();
        Ok(())
    }
}

/// A command buffer that a test ends.
#[derive(Clone, Default)]
pub(crate) struct Remote {
    state: Arc<Mutex<Option<(State, i64)>>>,
    ended: Arc<Mutex<Option<Arc<Latch>>>>,
}

impl Remote {
    pub(crate) fn end(&self, state: State, code: i64) {
        *self.state.lock().unwrap() = Some((state, code));
        self.ended.lock().unwrap().as_ref().expect("it was handed over").open();
    }
}

impl Command for Remote {
    fn commit(&self, ended: Arc<Latch>) {
        assert!(self.ended.lock().unwrap().replace(ended).is_none(), "handed over twice");
    }
    fn state(&self) -> State {
        self.state.lock().unwrap().map_or(State::Scheduled, |(state, _)| state)
    }
    fn failure(&self) -> Failure {
        let code = self.state.lock().unwrap().map_or(0, |(_, code)| code);
        Failure::new(COMMAND_BUFFER_DOMAIN.into(), code, "a message".into())
    }
    fn stamps(&self) -> Stamps {
        Stamps { gpu_start: 1.0, gpu_end: 1.25, schedule_start: 0.5, schedule_end: 0.625 }
    }
    fn block(&self) {
        let ended = self.ended.lock().unwrap().clone().expect("it was handed over");
        ended.wait(Duration::from_secs(60)).expect("a test ends what it begins");
    }
}

#[derive(Default)]
pub(crate) struct Gpu {
    pub(crate) health: Arc<Health>,
    pub(crate) capturing: AtomicBool,
    /// Refuses the next command buffer.
    pub(crate) full: AtomicBool,
    /// All that were handed over.
    pub(crate) commands: Mutex<Vec<Remote>>,
    /// How they end, where they do so at once.
    pub(crate) ends: Mutex<Option<(State, i64)>>,
    /// What was handed over: a line a dispatch, a barrier and a submission.
    pub(crate) log: Mutex<Vec<String>>,
}

#[derive(Default)]
pub(crate) struct Encoder {
    pub(crate) declared: Vec<Span>,
    pub(crate) uses: Vec<Use>,
    pub(crate) dispatches: u64,
    lines: Vec<String>,
}

impl Backend for Gpu {
    type Driver = Driver;
    type Encoder<'a> = Encoder;
    type Command = Remote;

    fn health(&self) -> &Health {
        &self.health
    }
    fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }
    fn address(driver: &Driver, span: Span) -> Option<u64> {
        driver.known.iter().find(|known| known.contains(span)).map(|_| span.base as u64 + (1 << 30))
    }
    fn begin(&self, driver: &mut Driver) -> Result<Encoder, MetalError> {
        match self.full.swap(false, Ordering::Relaxed) {
            true => Err(MetalError::NotMade { what: "a command buffer".into() }),
            false => Ok(Encoder { declared: std::mem::take(&mut driver.declared), ..Encoder::default() }),
        }
    }
    fn commit(&self, encoder: Encoder) -> InFlight<Remote> {
        let command = Remote::default();
        self.commands.lock().unwrap().push(command.clone());
        let mut log = self.log.lock().unwrap();
        log.extend(encoder.lines);
        log.push("submit".into());
        let (health, encode) = (Arc::clone(&self.health), Duration::from_millis(3));
        let started = InFlight::start(command.clone(), health, encoder.uses, encoder.dispatches, encode);
        if let Some((state, code)) = *self.ends.lock().unwrap() {
            command.end(state, code);
        }
        started
    }
}

impl Gpu {
    /// The command buffer that was handed over last.
    pub(crate) fn last(&self) -> Remote {
        self.commands.lock().unwrap().last().cloned().expect("something was handed over")
    }

    pub(crate) fn end_last(&self, state: State, code: i64) {
        self.last().end(state, code);
    }
}

/// Memory of the double's own.
pub(crate) struct Bytes {
    bytes: Vec<u8>,
    uses: Uses,
}

impl Memory for Bytes {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MetalError> {
        self.uses.none()?;
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MetalError> {
        self.uses.none()?;
        bytes.copy_from_slice(&self.bytes[offset..offset + bytes.len()]);
        Ok(())
    }
}

impl LaunchBackend for Gpu {
    type Memory = Bytes;

    fn allocate(&self, bytes: usize) -> Result<Bytes, MetalError> {
        Ok(Bytes { bytes: vec![0; bytes], uses: Uses::default() })
    }
    fn dispatch(encoder: &mut Encoder, dispatch: &Dispatch<'_, Bytes>) -> Result<(), MetalError> {
        if dispatch.kernel == "missing" {
            return Err(MetalError::NoKernel { kernel: dispatch.kernel.into() });
        }
        let mut line =
            format!("{} {:?} {:?}", dispatch.kernel, dispatch.shape.groups, dispatch.shape.threads);
        for argument in dispatch.arguments {
            line += &match argument {
                Argument::Buffer { index, buffer, offset } => {
                    encoder.uses.push(buffer.uses.begin());
                    format!(" {index}: {} from {offset}", buffer.bytes.len())
                }
                Argument::Bytes { index, bytes } => format!(" {index}: {bytes:?}"),
                Argument::Threadgroup { index, len } => format!(" group {index}: {len}"),
            };
        }
        encoder.lines.push(line);
        encoder.dispatches += 1;
        Ok(())
    }
    fn barrier(encoder: &mut Encoder) {
        encoder.lines.push("barrier".into());
    }
}
