//! Files written as a stream: the header is known before the first data byte. Safetensors headers are made here.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use metaltail_quant::{Format, MatrixLayout};
use xxhash_rust::xxh3::Xxh3;

use super::WriteError;
use crate::regular::create_regular;

/// Bytes gathered before the operating system is called.
const BUFFER: usize = 4 << 20;

/// Suffix of a file that is not complete yet.
pub(crate) const PARTIAL: &str = ".partial";

/// The safetensors type name that holds a format's weights.
pub(crate) fn dtype(format: Format) -> &'static str {
    match format {
        Format::F32 => "F32",
        Format::F16 => "F16",
        Format::Bf16 => "BF16",
        Format::Int8Row => "I8",
        Format::Fp8Block => "F8_E4M3",
        _ => "U8",
    }
}

/// Shape of the weights tensor of a matrix: in elements of [`dtype`], 1-D for a single row.
pub(crate) fn weights_shape(layout: &MatrixLayout) -> Vec<usize> {
    let cols = match dtype(layout.format()) {
        "U8" => layout.row_bytes(),
        _ => layout.cols(),
    };
    match layout.rows() {
        1 => vec![cols],
        rows => vec![rows, cols],
    }
}

/// A file whose every byte position is fixed.
#[derive(Clone, Debug)]
pub(crate) struct FilePlan {
    name: String,
    header: Vec<u8>,
    data: u64,
}

impl FilePlan {
    /// A file of this header and `data` bytes behind it.
    ///
    /// # Errors
    /// More than 2^64 bytes.
    pub(crate) fn new(name: String, header: Vec<u8>, data: u64) -> Result<FilePlan, WriteError> {
        match data.checked_add(header.len() as u64) {
            Some(_) => Ok(FilePlan { name, header, data }),
            None => Err(WriteError::Overflow { file: name }),
        }
    }

    /// Name in the output directory.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The header's bytes, its length and padding included.
    pub(crate) fn header(&self) -> &[u8] {
        &self.header
    }

    /// Length of the whole file in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.data
    }

    /// Where the data begins in the file.
    pub(crate) fn data_start(&self) -> u64 {
        self.header.len() as u64
    }
}

/// Tensors of one file in the order of their bytes.
#[derive(Debug)]
pub(crate) struct FilePlanner {
    name: String,
    entries: serde_json::Map<String, serde_json::Value>,
    offset: u64,
    pads: u32,
}

impl FilePlanner {
    /// An empty file.
    pub(crate) fn new(name: String) -> FilePlanner {
        FilePlanner { name, entries: serde_json::Map::new(), offset: 0, pads: 0 }
    }

    /// Appends a tensor of `len` bytes.
    pub(crate) fn push(
        &mut self,
        tensor: &str,
        dtype: &str,
        shape: &[usize],
        len: u64,
    ) -> Result<(), WriteError> {
        let end =
            self.offset.checked_add(len).ok_or_else(|| WriteError::Overflow { file: self.name.clone() })?;
        let entry = serde_json::json!({
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [self.offset, end],
        });
        self.entries.insert(tensor.to_owned(), entry);
        self.offset = end;
        Ok(())
    }

    /// Fills up to a multiple of `align` with a `__pad.N` tensor, since safetensors allows no holes.
    pub(crate) fn pad_to(&mut self, align: u64) -> Result<(), WriteError> {
        let gap = gap(self.offset, align);
        if gap > 0 {
            let tensor = format!("__pad.{}", self.pads);
            self.pads += 1;
            self.push(&tensor, "U8", &[gap as usize], gap)?;
        }
        Ok(())
    }

    /// Fixes the header; data will begin at a multiple of `align`.
    pub(crate) fn finish(self, metadata: &BTreeMap<&str, String>, align: u64) -> FilePlan {
        let mut root = serde_json::Map::new();
        if !metadata.is_empty() {
            root.insert("__metadata__".to_owned(), serde_json::json!(metadata));
        }
        root.extend(self.entries);
        let json = serde_json::Value::Object(root).to_string();
        let end = 8 + json.len() as u64;
        let length = (end + gap(end, align) - 8) as usize;
        let mut header = Vec::with_capacity(8 + length);
        header.extend_from_slice(&(length as u64).to_le_bytes());
        header.extend_from_slice(json.as_bytes());
        header.resize(8 + length, b' ');
        FilePlan { name: self.name, header, data: self.offset }
    }
}

/// Bytes from `offset` to the next multiple of `align`.
pub(crate) fn gap(offset: u64, align: u64) -> u64 {
    offset.next_multiple_of(align) - offset
}

/// Writes one planned file, front to back, under a temporary name.
pub(crate) struct FileWriter<'p> {
    plan: &'p FilePlan,
    path: PathBuf,
    partial: PathBuf,
    file: BufWriter<File>,
    hash: Xxh3,
    written: u64,
}

impl<'p> FileWriter<'p> {
    /// Opens `NAME.partial`, emptying a left-over one, and writes the header.
    pub(crate) fn create(dir: &Path, plan: &'p FilePlan) -> Result<FileWriter<'p>, WriteError> {
        let path = dir.join(&plan.name);
        let partial = dir.join(format!("{}{PARTIAL}", plan.name));
        let file = create_regular(&partial).map_err(WriteError::io("create", &partial))?;
        let file = BufWriter::with_capacity(BUFFER, file);
        let mut writer = FileWriter { plan, path, partial, file, hash: Xxh3::new(), written: 0 };
        writer.write(plan.header())?;
        Ok(writer)
    }

    /// Bytes written so far, header included.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.file.write_all(bytes).map_err(WriteError::io("write", &self.partial))?;
        self.hash.update(bytes);
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Appends the zeros of a pad up to a multiple of `align` (at most 4096) of the file.
    pub(crate) fn pad_to(&mut self, align: u64) -> Result<(), WriteError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        let gap = gap(self.written - self.plan.data_start(), align) as usize;
        self.write(&ZEROS[..gap])
    }

    /// Syncs the file and gives it its name; returns the XXH3-64 of all its bytes.
    pub(crate) fn finish(mut self) -> Result<u64, WriteError> {
        if self.written != self.plan.bytes() {
            return Err(WriteError::Length {
                file: self.plan.name.clone(),
                planned: self.plan.bytes(),
                written: self.written,
            });
        }
        self.file.flush().map_err(WriteError::io("write", &self.partial))?;
        self.file.get_ref().sync_all().map_err(WriteError::io("sync", &self.partial))?;
        fs::rename(&self.partial, &self.path).map_err(WriteError::io("rename", &self.partial))?;
        Ok(self.hash.digest())
    }
}

/// Writes a small file so that it is either the old one or the new one, whole.
pub(crate) fn write_atomic(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
    let partial = dir.join(format!("{name}{PARTIAL}"));
    let write = || {
        let mut file = create_regular(&partial).map_err(WriteError::io("create", &partial))?;
        file.write_all(bytes).map_err(WriteError::io("write", &partial))?;
        file.sync_all().map_err(WriteError::io("sync", &partial))?;
        fs::rename(&partial, dir.join(name)).map_err(WriteError::io("rename", &partial))
    };
    // A full drive leaves no part of it behind; the first error is the one that tells.
    write().inspect_err(|_| drop(fs::remove_file(&partial)))?;
    sync_dir(dir)
}

/// Makes renames in `dir` durable, where the system can (a directory cannot be opened on Windows).
pub(crate) fn sync_dir(dir: &Path) -> Result<(), WriteError> {
    #[cfg(unix)]
    File::open(dir).and_then(|d| d.sync_all()).map_err(WriteError::io("sync", dir))?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}
