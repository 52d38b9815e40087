//! Gives guests their own copies of shared pages again, as far as the hypervisor has memory for them.

use crate::hypervisor::{CallError, Domain, DomainId, Gfn, GuestPage, Hypervisor};
use crate::ranges::end;
use pagefold_engine::units::{Pages, count};

/// How many pages we give back before we check again how much memory is left.
const BATCH: usize = 256;
/// How many frames we look at before we ask the hypervisor whether any of the guest's pages is still shared.
const ASK_AFTER: u64 = 4_096;

/// The pages that we gave back to a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GivenBack {
    /// How many pages were shared and are now the guest's own.
    pub pages: Pages,
    /// How many pages are still shared, because too little memory would have been left.
    pub left: Pages,
}

/// If the guest has ended, or the hypervisor doesn't say how much memory is left.
pub fn unshare(hypervisor: &mut impl Hypervisor, guest: &Domain, keep: Pages) -> Result<GivenBack, CallError> {
    let domain = guest.id;
    let mut given = GivenBack::default();
    let mut batch = Batch::default();
    // We look at all frames until we've found all shared pages, not only at ranges: a guest may have given back the
    // memory around them. If the guest writes to a shared page, the page becomes its own. So we may never find as many
    // as we expect, and there may be holes of a million frames behind the last one.
    let mut found = Pages(0);
    for frame in (0..end(hypervisor, domain, guest.most)?).map(Gfn) {
        if found >= guest.shared {
            break;
        }
        if frame.0 % ASK_AFTER == ASK_AFTER - 1 {
            give_back(hypervisor, domain, std::mem::take(&mut batch), keep, &mut given)?;
            if shared_now(hypervisor, domain)? == Pages(0) {
                return Ok(given);
            }
        }
        let Some(sharers) = hypervisor.sharers(GuestPage { domain, frame })? else { continue };
        found += Pages(1);
        batch.frames.push(frame);
        // If no other page has the frame, the page becomes the guest's own again without a copy.
        batch.copies += u64::from(sharers > 1);
        if batch.frames.len() == BATCH {
            give_back(hypervisor, domain, std::mem::take(&mut batch), keep, &mut given)?;
        }
    }
    give_back(hypervisor, domain, batch, keep, &mut given)?;
    Ok(given)
}

fn shared_now(hypervisor: &mut impl Hypervisor, domain: DomainId) -> Result<Pages, CallError> {
    let guest = hypervisor.domains()?.into_iter().find(|guest| guest.id == domain);
    guest.map(|guest| guest.shared).ok_or(CallError::Ended)
}

/// The pages to give back, and how many of them need a copy.
#[derive(Debug, Default)]
struct Batch {
    frames: Vec<Gfn>,
    copies: u64,
}

fn give_back(
    hypervisor: &mut impl Hypervisor,
    domain: DomainId,
    Batch { frames, copies }: Batch,
    keep: Pages,
    given: &mut GivenBack,
) -> Result<(), CallError> {
    let pages = count(frames.len());
    if copies > 0 && hypervisor.memory()?.free.0 < keep.0.saturating_add(copies) {
        given.left += Pages(pages);
    } else if pages > 0 {
        let own = hypervisor.unshare(domain, &frames)?;
        let done = count(own.iter().filter(|&&own| own).count());
        given.pages += Pages(done);
        given.left += Pages(pages - done);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Event, Model, page};
    use crate::sharing::{Pair, Sharer};

    fn shared(free: u64) -> Model {
        let mut model = Model::new(free);
        let contents: Vec<u8> = (0..1024_u32).map(|frame| u8::try_from(frame % 200).unwrap()).collect();
        model.create(1, "first", &contents);
        model.create(2, "second", &contents);
        let pairs: Vec<Pair> = (0..1000).map(|frame| Pair { take: page(2, frame), keep: page(1, frame) }).collect();
        Sharer::new().merge(&mut model, &pairs);
        assert_eq!(model.saved(), 1000);
        model
    }

    fn guest(model: &mut Model, id: u16) -> Domain {
        let domains = model.domains().unwrap();
        domains.into_iter().find(|domain| domain.id == DomainId(id)).unwrap()
    }

    #[test]
    fn everything_is_given_back() {
        let mut model = shared(100);
        let second = guest(&mut model, 2);
        let given = unshare(&mut model, &second, Pages(100)).unwrap();
        assert_eq!(given, GivenBack { pages: Pages(1000), left: Pages(0) });
        let first = guest(&mut model, 1);
        let given = unshare(&mut model, &first, Pages(100)).unwrap();
        assert_eq!((given.left, model.saved()), (Pages(0), 0));
        assert_eq!(model.memory().unwrap().frames, Pages(0), "nothing is nominated any more");
        model.check();
    }

    #[test]
    fn no_more_is_given_back_than_there_is_room_for() {
        let mut model = shared(100);
        let second = guest(&mut model, 2);
        let given = unshare(&mut model, &second, Pages(600)).unwrap();
        assert_eq!(given, GivenBack { pages: Pages(256 + 232), left: Pages(512) });
        assert!(model.memory().unwrap().free >= Pages(600));
        model.check();
    }

    #[test]
    fn when_nothing_is_shared_any_more_no_further_frames_are_looked_at() {
        let mut model = shared(1000);
        model.place(page(2, 1 << 20), 7);
        let second = guest(&mut model, 2);
        model.act(Event::Write(page(2, 30), 201));
        let given = unshare(&mut model, &second, Pages(100)).unwrap();
        assert_eq!(given, GivenBack { pages: Pages(999), left: Pages(0) });
        assert!(model.looked_at <= ASK_AFTER, "{}", model.looked_at);
        model.check();
    }

    #[test]
    fn what_a_guest_has_hidden_since_is_given_back() {
        let mut model = shared(1000);
        // Patches of eight pages remain, too short for ranges.
        for frame in (0..1024).filter(|frame| frame % 64 >= 8) {
            model.act(Event::Release(page(2, frame)));
        }
        let second = guest(&mut model, 2);
        assert_eq!(second.shared, Pages(128));
        let given = unshare(&mut model, &second, Pages(100)).unwrap();
        assert_eq!(given, GivenBack { pages: Pages(128), left: Pages(0) });
        model.check();
    }
}
