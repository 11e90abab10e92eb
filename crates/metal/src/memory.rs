//! Host memory as a device takes it: whole pages, and where an address lies.

use std::collections::BTreeMap;

use metaltail_device::residency::Span;

/// Why a device cannot use host memory where it lies.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unwrappable {
    /// It does not begin with a page.
    #[error(
        "{span} do not begin with a page of {page} bytes: a device takes whole pages (--slab-allocation per-expert needs slots of whole pages)"
    )]
    Misaligned {
        /// The memory.
        span: Span,
        /// Bytes of a page.
        page: usize,
    },
    /// It is empty, at address zero, or has no end in the address space.
    #[error("{span} are no memory")]
    NoMemory {
        /// The memory.
        span: Span,
    },
    /// It is larger than a buffer can be.
    #[error("{span} exceed the device's largest buffer, {limit} bytes")]
    TooLarge {
        /// The memory.
        span: Span,
        /// The limit.
        limit: u64,
    },
}

/// The whole pages that `span` fills: it begins with one, and its last one is taken whole.
///
/// The rest of the last page belongs to the same mapping or to none, so a device that is shown it sees nothing that
/// it could not be shown; and nothing else can be wrapped there, since that would not begin with a page.
///
/// # Errors
/// Memory that a device cannot use.
pub fn whole_pages(span: Span, page: usize, largest: u64) -> Result<Span, Unwrappable> {
    if span.len == 0 || span.base == 0 || span.end().is_none() || page == 0 {
        return Err(Unwrappable::NoMemory { span });
    }
    if !span.base.is_multiple_of(page) {
        return Err(Unwrappable::Misaligned { span, page });
    }
    let len = span.len.checked_next_multiple_of(page).ok_or(Unwrappable::NoMemory { span })?;
    let whole = Span { base: span.base, len };
    if whole.end().is_none() {
        return Err(Unwrappable::NoMemory { span });
    }
    if len as u64 > largest {
        return Err(Unwrappable::TooLarge { span, limit: largest });
    }
    Ok(whole)
}

/// Host memory that a device knows, and what it knows it by. Spans do not overlap.
#[derive(Clone, Debug)]
pub struct Mapped<T> {
    spans: BTreeMap<usize, (usize, T)>,
}

impl<T> Default for Mapped<T> {
    fn default() -> Mapped<T> {
        Mapped { spans: BTreeMap::new() }
    }
}

impl<T> Mapped<T> {
    /// Adds memory. Whether it could be: not where it overlaps what is there.
    pub fn insert(&mut self, span: Span, value: T) -> bool {
        let Some(end) = span.end().filter(|_| span.len > 0) else { return false };
        let before = self.spans.range(..end).next_back();
        // Only the last one that begins before the end can reach into it: those before it end earlier.
        if before.is_some_and(|(base, (len, _))| base.saturating_add(*len) > span.base) {
            return false;
        }
        self.spans.insert(span.base, (span.len, value));
        true
    }

    /// Takes memory out that was added as exactly this.
    pub fn remove(&mut self, span: Span) -> Option<T> {
        self.get(span)?;
        self.spans.remove(&span.base).map(|(_, value)| value)
    }

    /// What was added as exactly this.
    pub fn get(&self, span: Span) -> Option<&T> {
        self.spans.get(&span.base).filter(|(len, _)| *len == span.len).map(|(_, value)| value)
    }

    /// The memory that holds all of `span`, and where in it `span` begins, in bytes.
    pub fn find(&self, span: Span) -> Option<(&T, usize)> {
        let (&base, (len, value)) = self.spans.range(..=span.base).next_back()?;
        Span { base, len: *len }.contains(span).then_some((value, span.base - base))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 16384;
    const GIB: u64 = 1 << 30;

    fn at(base: usize, len: usize) -> Span {
        Span { base, len }
    }

    #[test]
    fn the_last_page_is_taken_whole_and_the_first_must_be() {
        let whole = |base, len| whole_pages(at(base, len), PAGE, GIB);
        assert_eq!(whole(PAGE, 1), Ok(at(PAGE, PAGE)));
        assert_eq!(whole(3 * PAGE, PAGE + 4096), Ok(at(3 * PAGE, 2 * PAGE)));
        assert_eq!(whole(3 * PAGE, 2 * PAGE), Ok(at(3 * PAGE, 2 * PAGE)));
        // A mapping of a system with pages of 4 KiB.
        assert!(matches!(whole(PAGE + 4096, PAGE), Err(Unwrappable::Misaligned { page: PAGE, .. })));
    }

    #[test]
    fn what_is_no_memory_or_too_much_is_refused() {
        let whole = |base, len| whole_pages(at(base, len), PAGE, GIB);
        for bad in [
            (0, PAGE),
            (PAGE, 0),
            (PAGE, usize::MAX),
            (usize::MAX - PAGE + 1, PAGE),
            (PAGE, usize::MAX - PAGE),
        ] {
            assert!(matches!(whole(bad.0, bad.1), Err(Unwrappable::NoMemory { .. })), "{bad:?}");
        }
        assert_eq!(whole(PAGE, GIB as usize).unwrap().len as u64, GIB);
        let large = whole(PAGE, GIB as usize + 1).unwrap_err();
        assert!(matches!(large, Unwrappable::TooLarge { limit: GIB, .. }), "{large}");
    }

    #[test]
    fn a_lease_is_found_with_its_offset_and_nothing_across_a_border() {
        let mut mapped = Mapped::default();
        assert!(mapped.insert(at(PAGE, 2 * PAGE), 'a') && mapped.insert(at(3 * PAGE, PAGE), 'b'));
        assert_eq!(mapped.find(at(PAGE + 5, 10)), Some((&'a', 5)));
        assert_eq!(mapped.find(at(3 * PAGE, PAGE)), Some((&'b', 0)));
        for outside in
            [at(PAGE - 1, 2), at(3 * PAGE - 1, 2), at(4 * PAGE - 1, 2), at(9 * PAGE, 1), at(PAGE, usize::MAX)]
        {
            assert_eq!(mapped.find(outside), None, "{outside}");
        }
        for overlapping in
            [at(PAGE, PAGE), at(1, 3 * PAGE), at(2 * PAGE, 1), at(1, 8 * PAGE), at(7 * PAGE, 0)]
        {
            assert!(!mapped.insert(overlapping, 'c'), "{overlapping}");
        }
        assert_eq!((mapped.remove(at(PAGE, PAGE)), mapped.len()), (None, 2));
        assert_eq!((mapped.remove(at(PAGE, 2 * PAGE)), mapped.len()), (Some('a'), 1));
    }

    proptest! {
        /// Against a plain list of spans that is searched whole.
        #[test]
        fn it_finds_what_a_search_of_all_finds(
            adds in prop::collection::vec((1usize..64, 1usize..9), 1..20), asked in (0usize..70, 1usize..5)
        ) {
            let (mut mapped, mut list) = (Mapped::default(), Vec::new());
            for (number, (base, len)) in adds.into_iter().enumerate() {
                let free = !list.iter().any(|(s, _): &(Span, usize)| base < s.base + s.len && s.base < base + len);
                prop_assert_eq!(mapped.insert(at(base, len), number), free);
                if free {
                    list.push((at(base, len), number));
                }
            }
            let span = at(asked.0, asked.1);
            let plain = list.iter().find(|(s, _)| s.contains(span)).map(|(s, n)| (*n, span.base - s.base));
            prop_assert_eq!(mapped.find(span).map(|(n, offset)| (*n, offset)), plain);
        }
    }
}
