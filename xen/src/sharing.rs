//! The hypervisor compares nothing. So we first nominate pages, then compare them, and then share them by the handles
//! from the nominations. If a page is written in between, it loses its handle, and the hypervisor refuses it. We never
//! rely on anything read before the nominations.
//!
//! The hypervisor replaces the client's frame in every page that has it, and panics (a lock taken in the wrong order)
//! if one of those pages belongs to a guest other than the two that we name. So a client must be the only page of its
//! frame. Handles come from a counter. So if a handle is newer than all before it, its frame was nominated just now and
//! has one page. The frame keeps this one page until it's the source of a share. If a handle is older and we haven't
//! recorded it, we know nothing about its frame, so that can only be a source. This covers everything shared before
//! this run, and holds only while no other program shares memory on the machine.
//!
//! Within one guest, we don't share pages with a frame that another guest has, too. Instead we name a page of that
//! other guest as the source, if we know one. We then nominate and compare that page, not the one that it stands for:
//! somebody may have written that one, while its frame lives on in the others.

use crate::hypervisor::{CallError, DomainId, Gfn, GuestPage, Handle, Hypervisor, Nominated};
use pagefold_engine::hash::PageBytes;
use pagefold_engine::host::Merging;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// How many pages we compare at a time. Mapping a page costs 30 k instructions alone, and 4.5 k in batches of 64 or
/// more.
const BATCH: usize = 256;

/// How many frames we remember. Beyond this we forget all of them, and can then only use them as sources.
const FRAMES_MOST: usize = 1 << 22;

/// Two pages that the caller says are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The page to replace.
    pub take: GuestPage,
    /// The page to keep in its place.
    pub keep: GuestPage,
}

/// Two frames to compare.
#[derive(Clone, Copy, Debug)]
struct Compared {
    /// The number of the pair.
    number: usize,
    source: Gfn,
    client: Gfn,
}

/// Our record of a frame.
#[derive(Debug)]
enum Frame {
    /// We nominated the frame in this run, and it hasn't been a source. Only this page has it.
    Single(GuestPage),
    /// The frame was a source.
    Source(Sharers),
}

/// The guests that have a frame, each with a page that had it when we last looked. If the frame was shared before this
/// run, we may not know all its guests, but we know that there are two.
#[derive(Debug, Default)]
struct Sharers {
    known: Vec<(DomainId, Option<GuestPage>)>,
}

impl Sharers {
    fn add(&mut self, page: GuestPage) {
        match self.known.iter_mut().find(|(domain, _)| *domain == page.domain) {
            Some((_, known)) => *known = Some(page),
            None => self.known.push((page.domain, Some(page))),
        }
    }

    /// Whether this is the only guest known to have the frame.
    fn only(&self, domain: DomainId) -> bool {
        self.known.iter().all(|&(known, _)| known == domain)
    }
}

/// Shares pages. Only one sharer may run on a machine at a time.
#[derive(Debug, Default)]
pub struct Sharer {
    /// The newest handle that we've seen. `None` until the hypervisor has given out one in this run.
    newest: Option<Handle>,
    frames: FxHashMap<Handle, Frame>,
    /// The contents of the sources of a batch.
    contents: Vec<PageBytes>,
}

impl Sharer {
    /// A sharer that knows nothing of earlier shares.
    pub fn new() -> Self {
        Self::default()
    }

    /// Shares pages that are equal. Returns the outcome of each pair.
    pub fn merge(&mut self, hypervisor: &mut impl Hypervisor, pairs: &[Pair]) -> Vec<Merging> {
        if self.frames.len() > FRAMES_MOST {
            self.frames.clear();
        }
        let mut results = Vec::with_capacity(pairs.len());
        for batch in pairs.chunks(BATCH) {
            self.merge_batch(hypervisor, batch, &mut results);
        }
        results
    }

    /// Forgets the pages of a guest that has ended.
    pub fn forget(&mut self, domain: DomainId) {
        self.frames.retain(|_, frame| match frame {
            Frame::Single(page) => page.domain != domain,
            Frame::Source(sharers) => {
                for (known, page) in &mut sharers.known {
                    if *known == domain {
                        *page = None;
                    }
                }
                sharers.known.iter().any(|(_, page)| page.is_some())
            }
        });
    }

    fn merge_batch(&mut self, hypervisor: &mut impl Hypervisor, batch: &[Pair], results: &mut Vec<Merging>) {
        let begun = results.len();
        results.resize(begun + batch.len(), Merging::Untried);
        let results = &mut results[begun..];
        let mut handles = FxHashMap::default();
        let named = self.nominate_all(hypervisor, batch, &mut handles, results);
        for number in self.compare(hypervisor, &named, results) {
            let Some((source, client)) = named[number] else { continue };
            // Meanwhile we may have shared another pair of the batch.
            let [source_now, client_now] = [source, client].map(|side| handles.get(&side.page).copied());
            results[number] = if source_now == client_now {
                Merging::Shared
            } else if (source_now, client_now) != (Some(source.handle), Some(client.handle))
                || self.source(source, client) != Some(source)
            {
                Merging::Busy
            } else {
                self.share(hypervisor, source, client, &mut handles)
            };
        }
    }

    /// Nominates both pages of each pair. Returns the source and the client of each pair that we may compare.
    fn nominate_all(
        &mut self,
        hypervisor: &mut impl Hypervisor,
        batch: &[Pair],
        handles: &mut FxHashMap<GuestPage, Handle>,
        results: &mut [Merging],
    ) -> Vec<Option<(Nominated, Nominated)>> {
        let mut named = vec![None; batch.len()];
        // We remember pages that can't be nominated: trying again costs a call, and we couldn't share a partner with
        // them anyway.
        let mut unfit: FxHashMap<GuestPage, Merging> = FxHashMap::default();
        for (number, Pair { take, keep }) in batch.iter().enumerate() {
            if take == keep {
                results[number] = Merging::Shared;
                continue;
            }
            match self.nominate_pair(hypervisor, *take, *keep, handles, &mut unfit) {
                Ok(found) => named[number] = Some(found),
                Err(Some(merging)) => results[number] = merging,
                // Without memory we don't try the rest.
                Err(None) => break,
            }
        }
        named
    }

    /// Nominates the pages of a pair. Returns the source and the client. The error is the pair's outcome if we mustn't
    /// compare them, or `None` if there's no memory.
    fn nominate_pair(
        &mut self,
        hypervisor: &mut impl Hypervisor,
        take: GuestPage,
        keep: GuestPage,
        handles: &mut FxHashMap<GuestPage, Handle>,
        unfit: &mut FxHashMap<GuestPage, Merging>,
    ) -> Result<(Nominated, Nominated), Option<Merging>> {
        let keep = self.nominate_once(hypervisor, keep, handles, unfit)?;
        let take = self.nominate_once(hypervisor, take, handles, unfit)?;
        if take.handle == keep.handle {
            return Err(Some(Merging::Shared));
        }
        let (source, client) = self.roles(take, keep).ok_or(Some(Merging::Ineligible))?;
        // Somebody may have written the page that stands in for the named one.
        let nominated = self.nominate_once(hypervisor, source.page, handles, unfit)?;
        if nominated != source {
            self.lose(source);
            return Err(Some(Merging::Busy));
        }
        Ok((source, client))
    }

    /// Nominates a page, unless an earlier pair of the batch has done so, or has found that the page can't be
    /// nominated.
    fn nominate_once(
        &mut self,
        hypervisor: &mut impl Hypervisor,
        page: GuestPage,
        handles: &mut FxHashMap<GuestPage, Handle>,
        unfit: &mut FxHashMap<GuestPage, Merging>,
    ) -> Result<Nominated, Option<Merging>> {
        if let Some(&merging) = unfit.get(&page) {
            return Err(Some(merging));
        }
        if let Some(&handle) = handles.get(&page) {
            return Ok(Nominated { page, handle });
        }
        match self.nominate(hypervisor, page) {
            Ok(handle) => {
                handles.insert(page, handle);
                Ok(Nominated { page, handle })
            }
            Err(CallError::NoMemory) => Err(None),
            Err(error) => Err(Some(*unfit.entry(page).or_insert(outcome(&error)))),
        }
    }

    fn nominate(&mut self, hypervisor: &mut impl Hypervisor, page: GuestPage) -> Result<Handle, CallError> {
        // The first handle of a run doesn't show how old it is. It's new if the page was neither nominated nor shared
        // before.
        let was_shared = self.newest.is_none() && hypervisor.sharers(page)?.is_some();
        let handle = hypervisor.nominate(page)?;
        if !was_shared && self.newest.is_none_or(|newest| handle > newest) {
            self.newest = Some(handle);
            self.frames.insert(handle, Frame::Single(page));
        }
        Ok(handle)
    }

    /// Compares the pages, all of which are nominated, batched by guests. Returns the numbers of the equal pairs.
    fn compare(
        &mut self,
        hypervisor: &mut impl Hypervisor,
        named: &[Option<(Nominated, Nominated)>],
        results: &mut [Merging],
    ) -> Vec<usize> {
        let mut equal = Vec::new();
        let mut by_guests: BTreeMap<(DomainId, DomainId), Vec<Compared>> = BTreeMap::new();
        for (number, pair) in named.iter().enumerate() {
            let Some((source, client)) = pair else { continue };
            let compared = Compared { number, source: source.page.frame, client: client.page.frame };
            by_guests.entry((source.page.domain, client.page.domain)).or_default().push(compared);
        }
        for ((sources, clients), pairs) in by_guests {
            let mut frames: Vec<Gfn> = pairs.iter().map(|pair| pair.source).collect();
            frames.sort_unstable();
            frames.dedup();
            let contents = &mut self.contents;
            let mut present = FxHashSet::default();
            contents.resize(frames.len(), [0; size_of::<PageBytes>()]);
            let mut read = hypervisor.read(sources, &frames, &mut |at, bytes| {
                if let (Some(bytes), Some(slot)) = (bytes, contents.get_mut(at)) {
                    slot.copy_from_slice(bytes);
                    present.insert(at);
                }
            });
            let others: Vec<Gfn> = pairs.iter().map(|pair| pair.client).collect();
            let mut found = Vec::new();
            if read.is_ok() {
                read = hypervisor.read(clients, &others, &mut |at, bytes| {
                    let place = pairs.get(at).and_then(|pair| frames.binary_search(&pair.source).ok());
                    found.push(match (bytes, place) {
                        (Some(bytes), Some(place)) if present.contains(&place) && contents[place] == *bytes => None,
                        (Some(_), Some(place)) if present.contains(&place) => Some(Merging::Differs),
                        _ => Some(Merging::Absent),
                    });
                });
            }
            let failed = read.err().map(|error| outcome(&error));
            for (at, pair) in pairs.iter().enumerate() {
                match (failed, found.get(at)) {
                    (None, Some(None)) => equal.push(pair.number),
                    (None, Some(&Some(merging))) | (Some(merging), _) => results[pair.number] = merging,
                    (None, None) => {}
                }
            }
        }
        equal.sort_unstable();
        equal
    }

    /// Shares two pages that we found equal after nominating them.
    fn share(
        &mut self,
        hypervisor: &mut impl Hypervisor,
        source: Nominated,
        client: Nominated,
        handles: &mut FxHashMap<GuestPage, Handle>,
    ) -> Merging {
        if let Err(error) = hypervisor.share(source, client) {
            if let CallError::SourceChanged = error {
                self.lose(source);
            }
            return outcome(&error);
        }
        self.frames.remove(&client.handle);
        handles.insert(client.page, source.handle);
        let mut sharers = match self.frames.remove(&source.handle) {
            Some(Frame::Source(sharers)) => sharers,
            // A frame that we don't know already has two guests.
            Some(Frame::Single(_)) | None => Sharers::default(),
        };
        sharers.add(source.page);
        sharers.add(client.page);
        self.frames.insert(source.handle, Frame::Source(sharers));
        Merging::Merged
    }

    /// Records that a page no longer has the frame that we knew it for.
    fn lose(&mut self, lost: Nominated) {
        if let Some(Frame::Source(sharers)) = self.frames.get_mut(&lost.handle) {
            for (_, page) in &mut sharers.known {
                if *page == Some(lost.page) {
                    *page = None;
                }
            }
        }
    }

    /// Chooses source and client so that sharing is safe however else the frames are shared. If possible, the page to
    /// keep is the source.
    fn roles(&self, take: Nominated, keep: Nominated) -> Option<(Nominated, Nominated)> {
        match self.source(keep, take) {
            Some(source) => Some((source, take)),
            None => Some((self.source(take, keep)?, keep)),
        }
    }

    /// Finds the page to name as the source, if we can share `client` with the frame of `source`.
    fn source(&self, source: Nominated, client: Nominated) -> Option<Nominated> {
        let is_single = matches!(self.frames.get(&client.handle), Some(Frame::Single(page)) if *page == client.page);
        if !is_single {
            return None;
        }
        if source.page.domain != client.page.domain {
            return Some(source);
        }
        match self.frames.get(&source.handle)? {
            Frame::Single(_) => Some(source),
            Frame::Source(sharers) if sharers.only(client.page.domain) => Some(source),
            Frame::Source(sharers) => {
                let mut elsewhere = sharers.known.iter().filter(|(domain, _)| *domain != client.page.domain);
                let page = elsewhere.find_map(|&(_, page)| page)?;
                Some(Nominated { page, handle: source.handle })
            }
        }
    }
}

/// The outcome for a page whose call failed.
fn outcome(error: &CallError) -> Merging {
    match error {
        CallError::Busy | CallError::ClientChanged | CallError::SourceChanged => Merging::Busy,
        CallError::Unfit => Merging::Ineligible,
        CallError::Ended | CallError::NoMemory | CallError::NoSharing | CallError::Denied | CallError::Other { .. } => {
            Merging::Untried
        }
    }
}

#[cfg(test)]
#[path = "sharing_tests.rs"]
mod tests;
