//! Which device is taken, and what it can take.

use metaltail_device::residency::{Limits, MOST_SETS};

use crate::error::MetalError;

/// The system setting that says how much memory a GPU may hold wired, in MiB; 0 leaves it to the system.
pub const WIRED_LIMIT: &str = "iogpu.wired_limit_mb";

/// What a device and its system say of themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The device's name.
    pub name: String,
    /// The GPU's architecture in the driver's words, where it tells.
    pub architecture: Option<String>,
    /// Whether processor and GPU share memory.
    pub unified: bool,
    /// Bytes that may be resident without a loss of speed (`recommendedMaxWorkingSetSize`).
    pub working_set: u64,
    /// The largest buffer in bytes.
    pub buffer: u64,
    /// [`WIRED_LIMIT`] in MiB; `None` where the system has no such setting.
    pub wired_limit_mib: Option<u64>,
    /// Bytes of a page.
    pub page: usize,
    /// Whether the system knows the calls of residency sets (macOS 15).
    pub set_calls: bool,
    /// Whether a buffer made for trial has an address.
    pub addresses: bool,
    /// Whether this is a virtual machine.
    pub virtual_machine: bool,
    /// The families that the device says it belongs to.
    pub families: Families,
    /// What a threadgroup can have.
    pub groups: GroupLimits,
}

/// Families of GPUs: what the feature tables promise of them, and in a virtual machine less than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Families {
    /// Apple 6 or later (A13, M1): has residency sets.
    pub apple6: bool,
    /// Metal 3: kernels may follow addresses.
    pub metal3: bool,
}

/// What a threadgroup can have on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// Threads along each axis.
    pub threads: [usize; 3],
    /// Bytes of threadgroup memory.
    pub memory: usize,
}

impl Facts {
    /// Whether the device can be used at all.
    ///
    /// # Errors
    /// Memory of its own, or buffers without addresses: experts are read where the processor put them.
    pub fn check(&self) -> Result<(), MetalError> {
        // The GPU of a virtual machine belongs to older families than the one behind it: a trial decides there.
        let follows = self.addresses && (self.families.metal3 || self.virtual_machine);
        let missing = match (self.unified, follows) {
            (false, _) => "it has memory of its own, and only GPUs that share the processor's are supported",
            (_, false) if self.virtual_machine => "this virtual machine's GPU gives buffers no addresses",
            (_, false) => "it or its system is older than Metal 3 (macOS 13)",
            (true, true) => return Ok(()),
        };
        Err(MetalError::Unusable { device: self.name.clone(), missing })
    }

    /// Why there are no residency sets, so that memory is declared with every submission; `None` where there are.
    pub fn no_sets(&self) -> Option<&'static str> {
        match (self.set_calls, self.families.apple6) {
            (true, true) => None,
            (false, _) => Some("macOS is older than 15"),
            (true, false) if self.virtual_machine => Some("a virtual machine's GPU"),
            (true, false) => Some("the GPU is older than Apple's family 6"),
        }
    }

    /// What may be resident: the device's word, less where the wired limit was set below it.
    pub fn resident(&self) -> u64 {
        match self.wired_limit_mib {
            None | Some(0) => self.working_set,
            Some(mib) => self.working_set.min(mib.saturating_mul(1 << 20)),
        }
    }

    /// The same in the ledger's terms.
    pub fn limits(&self) -> Limits {
        Limits {
            sets: if self.no_sets().is_none() { MOST_SETS } else { 0 },
            working_set: self.resident(),
            setting: self.wired_limit_mib.is_some().then_some(WIRED_LIMIT),
            allocation: self.buffer,
        }
    }

    /// All of it in lines for a report.
    pub fn lines(&self) -> Vec<String> {
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
        let yes = |is| if is { "yes" } else { "no" };
        let wired = match self.wired_limit_mib {
            None => "not there".to_string(),
            Some(0) => "0 (the system's choice)".to_string(),
            Some(mib) => format!("{mib} MiB"),
        };
        let [x, y, z] = self.groups.threads;
        vec![
            format!("device: {}", self.name),
            format!("architecture: {}", self.architecture.as_deref().unwrap_or("not told")),
            format!("unified memory: {}", yes(self.unified)),
            format!("working set: {}", gib(self.working_set)),
            format!("{WIRED_LIMIT}: {wired}"),
            format!("may be resident: {}", gib(self.resident())),
            format!("largest buffer: {}", gib(self.buffer)),
            format!("page: {} bytes", self.page),
            self.no_sets().map_or("residency sets: yes".into(), |why| format!("residency sets: no ({why})")),
            format!("buffer addresses: {}", yes(self.addresses)),
            format!("virtual machine: {}", yes(self.virtual_machine)),
            format!("families: Apple 6 {}, Metal 3 {}", yes(self.families.apple6), yes(self.families.metal3)),
            format!("threadgroup: {x} x {y} x {z} threads, {} bytes of memory", self.groups.memory),
        ]
    }
}

/// A system's integer setting as its bytes came: 4 or 8 of them, in the machine's order. `None` for other lengths
/// and for what is below zero.
pub fn integer_setting(bytes: &[u8]) -> Option<u64> {
    let value = match bytes.len() {
        4 => i64::from(i32::from_ne_bytes(bytes.try_into().ok()?)),
        8 => i64::from_ne_bytes(bytes.try_into().ok()?),
        _ => return None,
    };
    u64::try_from(value).ok()
}

/// A device among others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// Whether it shares the processor's memory.
    pub unified: bool,
    /// Whether it can be unplugged.
    pub removable: bool,
}

/// Which of the devices is taken: the one called `wanted` (the whole name, or a part of only one of them,
/// whatever the case); without a name the first that shares the processor's memory and cannot be unplugged,
/// else the first.
///
/// # Errors
/// No device, or none or several of that name.
pub fn choose(devices: &[Candidate], wanted: Option<&str>) -> Result<usize, MetalError> {
    if devices.is_empty() {
        return Err(MetalError::NoDevice);
    }
    let Some(wanted) = wanted else {
        return Ok(devices.iter().position(|d| d.unified && !d.removable).unwrap_or(0));
    };
    if let Some(exact) = devices.iter().position(|d| d.name == wanted) {
        return Ok(exact);
    }
    let part = wanted.to_lowercase();
    let mut named = (0..devices.len()).filter(|&n| devices[n].name.to_lowercase().contains(&part));
    match (named.next(), named.next()) {
        (Some(only), None) => Ok(only),
        _ => Err(MetalError::NoSuchDevice {
            wanted: wanted.into(),
            found: devices.iter().map(|d| d.name.clone()).collect(),
        }),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn facts() -> Facts {
        Facts {
            name: "Apple M9".into(),
            architecture: None,
            unified: true,
            working_set: 96 << 30,
            buffer: 72 << 30,
            wired_limit_mib: Some(0),
            page: 16384,
            set_calls: true,
            addresses: true,
            virtual_machine: false,
            families: Families { apple6: true, metal3: true },
            groups: GroupLimits { threads: [1024; 3], memory: 32768 },
        }
    }

    #[test]
    fn the_lower_of_working_set_and_wired_limit_counts() {
        assert_eq!(facts().limits().working_set, 96 << 30);
        let lowered = Facts { wired_limit_mib: Some(65536), ..facts() };
        assert_eq!(lowered.limits().working_set, 64 << 30);
        let raised = Facts { wired_limit_mib: Some(120_832), ..facts() };
        assert_eq!(raised.limits().working_set, 96 << 30);
        let huge = Facts { wired_limit_mib: Some(u64::MAX), ..facts() };
        assert_eq!(huge.limits().working_set, 96 << 30);
    }

    #[test]
    fn the_setting_is_named_only_where_there_is_one() {
        assert_eq!(facts().limits().setting, Some("iogpu.wired_limit_mb"));
        assert_eq!(Facts { wired_limit_mib: None, ..facts() }.limits().setting, None);
    }

    /// What the GPU of a virtual machine says of itself.
    fn guest() -> Facts {
        Facts { virtual_machine: true, families: Families { apple6: false, metal3: false }, ..facts() }
    }

    #[test]
    fn where_there_are_no_sets_the_ledger_walks_and_the_report_says_why() {
        assert_eq!((facts().limits().sets, facts().no_sets()), (MOST_SETS, None));
        let intel = Facts { families: Families { apple6: false, metal3: true }, ..facts() };
        let old = Facts { set_calls: false, ..facts() };
        for (facts, why) in [(old, "older than 15"), (intel, "family 6"), (guest(), "virtual machine")] {
            assert_eq!(facts.limits().sets, 0);
            let text = facts.lines().join("\n");
            assert!(
                text.contains("residency sets: no (") && facts.no_sets().unwrap().contains(why),
                "{text}"
            );
        }
    }

    #[test]
    fn a_virtual_machine_is_tried_and_not_asked_for_its_family() {
        assert_eq!(guest().check(), Ok(()));
        let none = Facts { addresses: false, ..guest() }.check().unwrap_err().to_string();
        assert!(none.contains("virtual machine"), "{none}");
        let old = Facts { virtual_machine: false, ..guest() }.check().unwrap_err().to_string();
        assert!(old.contains("Metal 3"), "{old}");
    }

    #[test]
    fn a_device_with_memory_of_its_own_is_refused() {
        assert_eq!(facts().check(), Ok(()));
        let apart = Facts { unified: false, ..facts() }.check().unwrap_err().to_string();
        assert!(apart.contains("Apple M9") && apart.contains("memory of its own"), "{apart}");
        let old = Facts { addresses: false, ..facts() }.check().unwrap_err().to_string();
        assert!(old.contains("macOS 13"), "{old}");
    }

    #[test]
    fn a_report_names_every_fact() {
        let text =
            Facts { wired_limit_mib: Some(120_832), virtual_machine: true, ..facts() }.lines().join("\n");
        for part in [
            "Apple M9",
            "96.00 GiB",
            "72.00 GiB",
            "120832 MiB",
            "resident: 96.00 GiB",
            "16384",
            "virtual machine: yes",
            "not told",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn settings_of_four_and_eight_bytes_are_read() {
        assert_eq!(integer_setting(&120_832i32.to_ne_bytes()), Some(120_832));
        assert_eq!(integer_setting(&(1i64 << 40).to_ne_bytes()), Some(1 << 40));
        assert_eq!(integer_setting(&(-1i32).to_ne_bytes()), None);
        assert_eq!(integer_setting(&i64::MIN.to_ne_bytes()), None);
        for wrong in [0, 1, 3, 5, 7, 9, 16] {
            assert_eq!(integer_setting(&vec![1; wrong]), None);
        }
    }

    fn device(name: &str, unified: bool, removable: bool) -> Candidate {
        Candidate { name: name.into(), unified, removable }
    }

    #[test]
    fn the_gpu_that_shares_memory_is_taken_unless_another_is_named() {
        let devices = [
            device("AMD Radeon Pro", false, true),
            device("Intel Iris", true, true),
            device("Apple M1 Max", true, false),
        ];
        assert_eq!(choose(&devices, None), Ok(2));
        assert_eq!(choose(&devices[..2], None), Ok(0));
        assert_eq!(choose(&devices, Some("radeon")), Ok(0));
        let several = choose(&devices, Some("r")).unwrap_err().to_string();
        assert!(several.contains("Intel Iris"), "{several}");
        assert!(matches!(choose(&devices, Some("M2")), Err(MetalError::NoSuchDevice { .. })));
        assert_eq!(choose(&[], None), Err(MetalError::NoDevice));
        let same = [device("Apple M1", true, false), device("Apple M1 Max", true, false)];
        assert_eq!(choose(&same, Some("Apple M1")), Ok(0), "the whole name is enough");
    }
}
