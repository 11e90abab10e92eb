//! The file of a usage profile. All numbers are little-endian:
//!
//! ```text
//! 8   magic "MTUSAGE\0"
//! 4   version, 1
//! 4   layers L
//! 4   experts that a token chooses in a layer, K
//! 8   hash of the checkpoint
//! 8 × L   number and experts of each layer, 4 bytes each
//! 8   selections recorded
//! 8 × Σ experts   counts, in 1/65,536 uses
//! 4   tokens in the sample T, 256 at most
//! 2 × T × L × K   experts, oldest token first; 65,535 for none
//! 8   XXH3-64 of all before
//! ```
//! The length follows from L, K, the experts and T, and is checked: the largest file that is read has
//! 64 MiB.

use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use super::sample::{NONE, SAMPLE_TOKENS};
use super::{MOST, UsageError, UsageIdentity, UsageProfile};

const MAGIC: &[u8; 8] = b"MTUSAGE\0";
const VERSION: u32 = 1;
/// Layers of a profile, as many as a trace may have.
const MOST_LAYERS: u32 = 1 << 12;
/// Bytes of a file at most.
pub(super) const MOST_BYTES: u64 = 64 << 20;

/// What identifies a model, as bytes: also the head of a file.
pub(super) fn identity_bytes(identity: &UsageIdentity) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + 8 * identity.layers.len());
    // At most 2^20 experts in as many layers.
    out.extend((identity.layers.len() as u32).to_le_bytes());
    out.extend(identity.top_k.to_le_bytes());
    out.extend(identity.checkpoint.to_le_bytes());
    for &(number, experts) in &identity.layers {
        out.extend(number.to_le_bytes());
        out.extend(experts.to_le_bytes());
    }
    out
}

/// The bytes of a profile's file.
pub(super) fn encode(profile: &UsageProfile) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend(identity_bytes(&profile.identity));
    out.extend(profile.selections.to_le_bytes());
    profile.counts.iter().for_each(|count| out.extend(count.to_le_bytes()));
    // At most 256.
    out.extend((profile.sample.tokens.len() as u32).to_le_bytes());
    for value in profile.sample.tokens.iter().flat_map(|token| token.iter()) {
        out.extend(value.to_le_bytes());
    }
    out.extend(xxh3_64(&out).to_le_bytes());
    out
}

/// Reads the bytes of a file.
///
/// # Errors
/// Anything but a whole profile of this version.
pub(super) fn decode(file: &Path, bytes: &[u8]) -> Result<UsageProfile, UsageError> {
    // A loss of power leaves such a file; it holds nothing that could be anyone's.
    if bytes.is_empty() {
        return Err(UsageError::Damaged { file: file.into(), reason: "it is empty".into() });
    }
    if !bytes.starts_with(MAGIC) {
        return Err(UsageError::Foreign { file: file.into(), got: bytes[..bytes.len().min(8)].to_vec() });
    }
    let damaged = |reason: String| UsageError::Damaged { file: file.into(), reason };
    let mut reader = Reader { bytes, at: MAGIC.len() };
    let got = reader.u32().map_err(damaged)?;
    if got != VERSION {
        return Err(UsageError::Version { file: file.into(), wanted: VERSION, got });
    }
    // A file that was cut is said to be short rather than to have a wrong checksum.
    let profile = body(&mut reader).map_err(damaged)?;
    let covered = &bytes[..reader.at];
    let wanted = reader.u64().map_err(damaged)?;
    let (got, end) = (xxh3_64(covered), reader.at);
    if wanted != got {
        return Err(damaged(format!("its checksum should be {wanted:016x}, its bytes have {got:016x}")));
    }
    if end != bytes.len() {
        return Err(damaged(format!("wanted {end} bytes, got {}", bytes.len())));
    }
    sound(&profile).map_err(damaged)?;
    Ok(profile)
}

/// Experts that there are, counts that a save can have written.
fn sound(profile: &UsageProfile) -> Result<(), String> {
    if let Some((layer, expert)) =
        profile.sample.uses(0).find(|&(layer, expert)| expert >= profile.identity.layers[layer].1)
    {
        let (number, experts) = profile.identity.layers[layer];
        return Err(format!("its sample names expert {expert} of layer {number}, which has {experts}"));
    }
    match profile.counts.iter().find(|&&count| count > MOST) {
        Some(count) => Err(format!("a count of {count} is larger than any")),
        None => Ok(()),
    }
}

fn body(reader: &mut Reader<'_>) -> Result<UsageProfile, String> {
    let layers = reader.u32()?;
    if layers > MOST_LAYERS {
        return Err(format!("it has {layers} layers; at most {MOST_LAYERS} are taken"));
    }
    let mut identity = UsageIdentity { layers: Vec::new(), top_k: reader.u32()?, checkpoint: reader.u64()? };
    for _ in 0..layers {
        identity.layers.push((reader.u32()?, reader.u32()?));
    }
    identity.check().map_err(|error| error.to_string())?;
    let mut profile = UsageProfile::new(identity);
    profile.selections = reader.u64()?;
    for count in &mut profile.counts {
        *count = reader.u64()?;
    }
    let tokens = reader.u32()? as usize;
    if tokens > SAMPLE_TOKENS {
        return Err(format!("its sample has {tokens} tokens; at most {SAMPLE_TOKENS} are taken"));
    }
    for _ in 0..tokens {
        // Taken whole first, so that a token beyond the end allocates nothing.
        let values = reader.take(2 * profile.sample.width)?.chunks_exact(2);
        let token = values.map(|pair| pair.try_into().map_or(NONE, u16::from_le_bytes)).collect();
        profile.sample.push(token);
    }
    Ok(profile)
}

struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Reader<'b> {
    fn take(&mut self, len: usize) -> Result<&'b [u8], String> {
        let left = self.bytes.len() - self.at;
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..len));
        let taken = taken
            .ok_or_else(|| format!("it ends early: at offset {} wanted {len} bytes, got {left}", self.at))?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let taken = self.take(N)?;
        taken.try_into().map_err(|_| format!("wanted {N} bytes, got {}", taken.len()))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }
}
