use super::*;
use crate::hypervisor::Gfn;
use crate::model::{Content, Event, Model, page};
use proptest::prelude::*;

fn pair(take: (u16, u64), keep: (u16, u64)) -> Pair {
    Pair { take: page(take.0, take.1), keep: page(keep.0, keep.1) }
}

fn model(guests: &[&[Content]]) -> Model {
    let mut model = Model::new(1000);
    for (number, contents) in (1..).zip(guests) {
        model.create(number, &format!("guest{number}"), contents);
    }
    model
}

#[test]
fn equal_pages_are_shared_and_others_not() {
    let mut model = model(&[&[1, 2, 3, 4], &[1, 2, 9, 4]]);
    let pairs: Vec<Pair> = (0..4).map(|frame| pair((2, frame), (1, frame))).collect();
    let results = Sharer::new().merge(&mut model, &pairs);
    assert_eq!(results, [Merging::Merged, Merging::Merged, Merging::Differs, Merging::Merged]);
    assert_eq!(model.saved(), 3);
    model.check();
    let results = Sharer::new().merge(&mut model, &pairs);
    assert_eq!(results[0], Merging::Shared);
}

#[test]
fn a_page_is_shared_with_many_in_one_batch_and_within_a_guest() {
    let mut model = model(&[&[7; 20], &[7; 20], &[7; 20]]);
    let mut sharer = Sharer::new();
    let all = (1..=3).flat_map(|guest| (0..20).map(move |frame| pair((guest, frame), (1, 0))));
    let results = sharer.merge(&mut model, &all.collect::<Vec<_>>());
    assert_eq!(results[0], Merging::Shared, "the page itself");
    assert!(results[1..].iter().all(|&merging| merging == Merging::Merged), "{results:?}");
    assert_eq!(model.saved(), 59);
    model.check();
}

#[test]
fn pages_of_a_guest_join_a_frame_of_several_through_another_guest() {
    let mut model = model(&[&[7; 3], &[7; 3]]);
    let mut sharer = Sharer::new();
    // Guest 2 already has a page with the frame of (1, 0) when we share another page of guest 1.
    for pairs in [pair((2, 0), (1, 0)), pair((1, 1), (1, 0)), pair((1, 2), (1, 1))] {
        assert_eq!(sharer.merge(&mut model, &[pairs]), [Merging::Merged]);
    }
    // Somebody writes guest 2's known page with the frame. Then there's none to name.
    model.act(Event::Write(page(2, 0), 1));
    model.act(Event::Write(page(1, 2), 7));
    assert_eq!(sharer.merge(&mut model, &[pair((1, 2), (1, 1))]), [Merging::Busy]);
    assert_eq!(sharer.merge(&mut model, &[pair((1, 2), (1, 1))]), [Merging::Ineligible]);
    model.check();
}

#[test]
fn a_page_that_stands_for_another_one_is_compared_itself() {
    let mut model = model(&[&[7, 9], &[7]]);
    let mut sharer = Sharer::new();
    assert_eq!(sharer.merge(&mut model, &[pair((2, 0), (1, 0))]), [Merging::Merged]);
    // We name and nominate (1, 0). Then it's written, and so equals (1, 1). But the page that we name to the hypervisor
    // is (2, 0).
    model.events = [Event::Nothing, Event::Nothing, Event::Nothing, Event::Write(page(1, 0), 9)].into();
    assert_eq!(sharer.merge(&mut model, &[pair((1, 1), (1, 0))]), [Merging::Differs]);
    model.check();
}

#[test]
fn what_was_shared_before_this_run_is_never_replaced() {
    let mut model = model(&[&[7; 2], &[7; 2], &[7; 2]]);
    let first = [pair((2, 0), (1, 0)), pair((3, 1), (2, 1))];
    assert_eq!(Sharer::new().merge(&mut model, &first), [Merging::Merged; 2]);
    let mut restarted = Sharer::new();
    // Both frames are older than this run, also the newer one.
    assert_eq!(restarted.merge(&mut model, &[pair((2, 0), (2, 1))]), [Merging::Ineligible]);
    assert_eq!(restarted.merge(&mut model, &[pair((3, 1), (1, 0))]), [Merging::Ineligible]);
    // A new page can join either frame.
    assert_eq!(restarted.merge(&mut model, &[pair((3, 0), (1, 0))]), [Merging::Merged]);
    assert_eq!(restarted.merge(&mut model, &[pair((1, 1), (2, 1))]), [Merging::Merged]);
    assert_eq!(restarted.merge(&mut model, &[pair((1, 1), (1, 0))]), [Merging::Ineligible]);
    model.check();
}

#[test]
fn the_page_that_others_were_shared_with_is_kept() {
    let mut model = model(&[&[7; 2], &[7; 2], &[7; 2]]);
    let mut sharer = Sharer::new();
    assert_eq!(sharer.merge(&mut model, &[pair((2, 0), (1, 0))]), [Merging::Merged]);
    // If we name the pages the other way round, the new page is still the one that's replaced.
    assert_eq!(sharer.merge(&mut model, &[pair((1, 0), (3, 0))]), [Merging::Merged]);
    assert_eq!(model.saved(), 2);
    model.check();
}

#[test]
fn refused_pages_have_their_reason() {
    let mut model = model(&[&[7; 3], &[7; 3]]);
    model.act(Event::Map(page(1, 1), true));
    let pairs =
        [pair((1, 0), (2, 9)), pair((2, 1), (1, 1)), pair((9, 0), (1, 0)), pair((1, 2), (2, 2)), pair((1, 1), (2, 2))];
    let results = Sharer::new().merge(&mut model, &pairs);
    assert_eq!(results, [Merging::Ineligible, Merging::Busy, Merging::Untried, Merging::Merged, Merging::Busy]);
    model.free = 0;
    let results = Sharer::new().merge(&mut model, &[pair((1, 0), (2, 0))]);
    assert_eq!(results, [Merging::Untried], "no memory for the records of a nomination");
}

#[test]
fn pages_are_mapped_once_for_all_that_are_compared_with_them() {
    let mut model = model(&[&[7], &[7; 200]]);
    let pairs: Vec<Pair> = (0..200).map(|frame| pair((2, frame), (1, 0))).collect();
    Sharer::new().merge(&mut model, &pairs);
    assert_eq!((model.saved(), model.mappings, model.nominations), (200, 201, 201));
}

/// Shows that the model would catch mistakes, so the tests above and below mean something.
mod the_model_finds {
    use super::*;

    fn nominated(model: &mut Model, page: GuestPage) -> Nominated {
        Nominated { page, handle: model.nominate(page).unwrap() }
    }

    #[test]
    #[should_panic(expected = "BUG: the client's frame is also mapped by another guest")]
    fn a_client_that_a_third_guest_has() {
        let mut model = model(&[&[7], &[7], &[7]]);
        let [first, second, third] = [1, 2, 3].map(|guest| nominated(&mut model, page(guest, 0)));
        model.share(first, second).unwrap();
        let _ = model.share(third, Nominated { handle: first.handle, ..second });
    }

    #[test]
    #[should_panic(expected = "holds what it must not")]
    fn pages_that_were_compared_before_they_were_nominated() {
        let mut model = model(&[&[7], &[7]]);
        model.read(DomainId(1), &[Gfn(0)], &mut |_, _| {}).unwrap();
        model.act(Event::Write(page(1, 0), 8));
        let [source, client] = [1, 2].map(|guest| nominated(&mut model, page(guest, 0)));
        model.share(source, client).unwrap();
        model.check();
    }

    #[test]
    fn a_write_after_the_nomination() {
        let mut model = model(&[&[7], &[7]]);
        let [source, client] = [1, 2].map(|guest| nominated(&mut model, page(guest, 0)));
        model.act(Event::Write(page(1, 0), 8));
        assert!(matches!(model.share(source, client), Err(CallError::SourceChanged)));
    }
}

/// An event between two calls, or in place of a merge.
#[derive(Clone, Debug)]
enum Step {
    Merge(Vec<Pair>, Vec<Event>),
    Restart,
    Destroy(u16),
    Create(u16, Vec<Content>),
}

const GUESTS: u16 = 4;
const FRAMES: u64 = 5;

fn pages() -> impl Strategy<Value = GuestPage> {
    (1..=GUESTS, 0..FRAMES).prop_map(|(guest, frame)| page(guest, frame))
}

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => Just(Event::Nothing),
        6 => (pages(), 0..3_u8).prop_map(|(page, content)| Event::Write(page, content)),
        1 => pages().prop_map(Event::Release),
        1 => (pages(), any::<bool>()).prop_map(|(page, is)| Event::Map(page, is)),
        1 => (1..=GUESTS).prop_map(|guest| Event::Destroy(DomainId(guest))),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let pairs = prop::collection::vec((pages(), pages()).prop_map(|(take, keep)| Pair { take, keep }), 1..12);
    prop_oneof![
        8 => (pairs, prop::collection::vec(events(), 0..60)).prop_map(|(pairs, events)| Step::Merge(pairs, events)),
        2 => Just(Step::Restart),
        1 => (1..=GUESTS).prop_map(Step::Destroy),
        2 => (1..=GUESTS, prop::collection::vec(0..3_u8, 5)).prop_map(|(guest, contents)| Step::Create(guest, contents)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    /// No sequence of calls makes the hypervisor panic, and if a page is written between any two of them, it's not
    /// shared wrongly.
    #[test]
    fn whatever_guests_do_the_hypervisor_lives_and_data_is_right(
        contents in prop::collection::vec(0..3_u8, 20),
        free in 0..40_u64,
        steps in prop::collection::vec(steps(), 1..14),
    ) {
        let mut model = Model::new(free);
        for (guest, contents) in (1..).zip(contents.chunks(5)) {
            model.create(guest, "guest", contents);
        }
        let mut sharer = Sharer::new();
        for step in steps {
            match step {
                Step::Merge(pairs, events) => {
                    model.events = events.into();
                    let before = model.clone();
                    let results = sharer.merge(&mut model, &pairs);
                    prop_assert_eq!(results.len(), pairs.len());
                    if before.events.is_empty() {
                        let merged = results.iter().filter(|&&merging| merging == Merging::Merged).count() as u64;
                        prop_assert_eq!(model.saved(), before.saved() + merged);
                    }
                    model.events.clear();
                }
                Step::Restart => sharer = Sharer::new(),
                Step::Destroy(guest) => {
                    model.act(Event::Destroy(DomainId(guest)));
                    sharer.forget(DomainId(guest));
                }
                // The real hypervisor reuses a number only after all others, but our rules don't depend on that.
                Step::Create(guest, contents) => {
                    model.act(Event::Destroy(DomainId(guest)));
                    model.create(guest, "guest", &contents);
                }
            }
            model.check();
        }
    }
}
