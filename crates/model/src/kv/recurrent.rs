//! The state of one recurrent layer: what it was before a step, what a step makes of it, and a copy from earlier on.

/// Numbers that a recurrent layer keeps of a sequence; all zero before its first position.
#[derive(Debug)]
pub(crate) struct State {
    /// The last inputs of the convolution, the oldest first: (kernel − 1) × channels.
    pub(crate) window: Vec<f32>,
    /// What was remembered: heads × values × keys.
    pub(crate) matrix: Vec<f32>,
}

impl State {
    fn new((window, matrix): (usize, usize)) -> State {
        State { window: vec![0.0; window], matrix: vec![0.0; matrix] }
    }

    fn copy_from(&mut self, other: &State) {
        self.window.copy_from_slice(&other.window);
        self.matrix.copy_from_slice(&other.matrix);
    }

    fn clear(&mut self) {
        self.window.fill(0.0);
        self.matrix.fill(0.0);
    }
}

/// Three states that take turns, so that neither a step nor keeping one copies anything.
#[derive(Debug)]
pub(super) struct Recurrent {
    /// After all positions of the sequence.
    committed: State,
    /// Where a step writes. What a step that failed wrote is never read.
    working: State,
    /// After an earlier position, which the cache knows.
    kept: State,
}

impl Recurrent {
    /// States that are held at a time.
    pub(super) const COPIES: u64 = 3;

    /// Before the first position; `sizes` are those of window and matrix, in numbers.
    pub(super) fn new(sizes: (usize, usize)) -> Recurrent {
        Recurrent { committed: State::new(sizes), working: State::new(sizes), kept: State::new(sizes) }
    }

    pub(super) fn committed(&self) -> &State {
        &self.committed
    }

    /// What a step reads and what it writes.
    pub(super) fn step(&mut self) -> (&State, &mut State) {
        (&self.committed, &mut self.working)
    }

    /// The step has ended well: what it wrote counts. With `keep` what was there before is kept.
    pub(super) fn commit(&mut self, keep: bool) {
        std::mem::swap(&mut self.committed, &mut self.working);
        if keep {
            std::mem::swap(&mut self.working, &mut self.kept);
        }
    }

    /// Back to the kept state, which is kept on.
    pub(super) fn restore(&mut self) {
        self.committed.copy_from(&self.kept);
    }

    /// Back to the beginning.
    pub(super) fn clear(&mut self) {
        self.committed.clear();
        self.kept.clear();
    }
}
