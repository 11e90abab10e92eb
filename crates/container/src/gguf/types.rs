//! Element types of GGUF tensors: number, name, and the size of a block.

use std::fmt;

/// What this program has to do with an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Support {
    /// It is computed where it lies.
    Computed,
    /// It is recognised and listed; it cannot be computed, which is said by name.
    None,
}

/// An element type. Values lie in blocks along a row; a block is some elements in some bytes.
///
/// Numbers, names and sizes are those of the format's public documentation and of the `gguf` Python
/// package, against which the table is tested.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TensorType(&'static Row);

#[derive(PartialEq, Eq)]
struct Row {
    number: u32,
    name: &'static str,
    elements: u64,
    bytes: u64,
    support: Support,
}

const fn computed(number: u32, name: &'static str, elements: u64, bytes: u64) -> Row {
    Row { number, name, elements, bytes, support: Support::Computed }
}

const fn listed(number: u32, name: &'static str, elements: u64, bytes: u64) -> Row {
    Row { number, name, elements, bytes, support: Support::None }
}

/// Numbers that are not here were never given out, or were withdrawn (4, 5, 31 to 33, 36 to 38).
static ROWS: [Row; 34] = [
    computed(0, "F32", 1, 4),
    computed(1, "F16", 1, 2),
    computed(2, "Q4_0", 32, 18),
    computed(3, "Q4_1", 32, 20),
    computed(6, "Q5_0", 32, 22),
    computed(7, "Q5_1", 32, 24),
    computed(8, "Q8_0", 32, 34),
    listed(9, "Q8_1", 32, 40),
    computed(10, "Q2_K", 256, 84),
    computed(11, "Q3_K", 256, 110),
    computed(12, "Q4_K", 256, 144),
    computed(13, "Q5_K", 256, 176),
    computed(14, "Q6_K", 256, 210),
    listed(15, "Q8_K", 256, 292),
    listed(16, "IQ2_XXS", 256, 66),
    listed(17, "IQ2_XS", 256, 74),
    listed(18, "IQ3_XXS", 256, 98),
    listed(19, "IQ1_S", 256, 50),
    computed(20, "IQ4_NL", 32, 18),
    listed(21, "IQ3_S", 256, 110),
    listed(22, "IQ2_S", 256, 82),
    computed(23, "IQ4_XS", 256, 136),
    listed(24, "I8", 1, 1),
    listed(25, "I16", 1, 2),
    listed(26, "I32", 1, 4),
    listed(27, "I64", 1, 8),
    listed(28, "F64", 1, 8),
    listed(29, "IQ1_M", 256, 56),
    computed(30, "BF16", 1, 2),
    listed(34, "TQ1_0", 256, 54),
    listed(35, "TQ2_0", 256, 66),
    computed(39, "MXFP4", 32, 17),
    listed(40, "NVFP4", 64, 36),
    listed(41, "Q1_0", 128, 18),
];

impl TensorType {
    /// Numbers of 32 bits.
    pub const F32: TensorType = TensorType(&ROWS[0]);
    /// Blocks of 32 values of four bits and one scale.
    pub const Q4_0: TensorType = TensorType(&ROWS[2]);

    /// The type of this name, in any case.
    pub fn from_name(name: &str) -> Option<TensorType> {
        TensorType::all().find(|kind| kind.name().eq_ignore_ascii_case(name))
    }

    /// The type of this number, if there is one.
    pub fn from_number(number: u32) -> Option<TensorType> {
        ROWS.iter().find(|row| row.number == number).map(TensorType)
    }

    /// All types, by number.
    pub fn all() -> impl Iterator<Item = TensorType> {
        ROWS.iter().map(TensorType)
    }

    /// Its number in a file.
    pub fn number(self) -> u32 {
        self.0.number
    }

    /// Its name, in capitals.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Elements of a block. A row is a whole number of blocks.
    pub fn block_elements(self) -> u64 {
        self.0.elements
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.0.bytes
    }

    /// Whether it is computed.
    pub fn support(self) -> Support {
        self.0.support
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
