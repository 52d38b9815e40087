//! A model of the hypervisor: what it shares, when it refuses, and where it panics, following
//! `xen/arch/x86/mm/mem_sharing.c` of Xen 4.17.
//!
//! Before any call, guests may act: they write, end, give pages back, or have them mapped. The model knows the right
//! contents of each guest page, whatever was shared.

use crate::hypervisor::{
    CallError, Domain, DomainId, Gfn, GuestPage, Handle, Hypervisor, MachineMemory, Nominated, Refusal, See,
};
use pagefold_engine::units::Pages;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A page's contents: 4096 times this byte.
pub type Content = u8;

/// An action of a guest, or of dom0, before a call.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    Write(GuestPage, Content),
    /// The guest gives a page back to the hypervisor.
    Release(GuestPage),
    /// Another program in dom0 maps a page, or unmaps it.
    Map(GuestPage, bool),
    Destroy(DomainId),
    Nothing,
}

#[derive(Clone, Debug, Default)]
struct Frame {
    content: Content,
    handle: Option<Handle>,
    pages: BTreeSet<GuestPage>,
}

#[derive(Clone, Debug, Default)]
pub struct Model {
    frames: BTreeMap<u64, Frame>,
    /// The frame of each page, and the content that the guest has written to it.
    pages: BTreeMap<GuestPage, (u64, Content)>,
    mapped: BTreeSet<GuestPage>,
    names: BTreeMap<DomainId, String>,
    refusing: BTreeSet<DomainId>,
    /// Guests whose populate-on-demand memory has run out. Such a guest ends when someone looks at its memory.
    pub lacking: BTreeSet<DomainId>,
    last_frame_number: u64,
    last_handle: u64,
    pub free: u64,
    pub events: VecDeque<Event>,
    /// How many calls nominated and shared, and how many pages were mapped.
    pub nominations: u64,
    pub shares: u64,
    pub mappings: u64,
    /// How many frames somebody has asked about: whether they're populated, and how many pages share them.
    pub asked: u64,
    pub looked_at: u64,
}

pub fn page(domain: u16, frame: u64) -> GuestPage {
    GuestPage { domain: DomainId(domain), frame: Gfn(frame) }
}

impl Model {
    pub fn new(free: u64) -> Self {
        Self { free, ..Self::default() }
    }

    /// Creates a guest that has these pages from frame 0 on.
    pub fn create(&mut self, domain: u16, name: &str, contents: &[Content]) {
        self.names.insert(DomainId(domain), name.to_owned());
        for (frame, &content) in (0..).zip(contents) {
            self.place(page(domain, frame), content);
        }
    }

    pub fn place(&mut self, page: GuestPage, content: Content) {
        let number = self.allocate(content);
        self.attach(page, number);
    }

    /// Makes the guest's memory unshareable from now on.
    pub fn refuse(&mut self, domain: u16) {
        self.refusing.insert(DomainId(domain));
    }

    fn allocate(&mut self, content: Content) -> u64 {
        self.last_frame_number += 1;
        self.frames.insert(self.last_frame_number, Frame { content, ..Frame::default() });
        self.last_frame_number
    }

    fn attach(&mut self, page: GuestPage, number: u64) {
        let frame = self.frames.get_mut(&number).unwrap();
        frame.pages.insert(page);
        let content = frame.content;
        self.pages.entry(page).or_insert((number, content)).0 = number;
    }

    /// Takes a page from its frame. Frees the frame if that was its last page.
    fn detach(&mut self, page: GuestPage) {
        let number = self.pages[&page].0;
        let frame = self.frames.get_mut(&number).unwrap();
        frame.pages.remove(&page);
        if frame.pages.is_empty() {
            self.frames.remove(&number);
        }
    }

    pub fn act(&mut self, event: Event) {
        match event {
            Event::Write(page, content) if self.pages.contains_key(&page) && self.make_own(page) => {
                let (number, known) = self.pages.get_mut(&page).unwrap();
                *known = content;
                self.frames.get_mut(number).unwrap().content = content;
            }
            Event::Release(page) if self.pages.contains_key(&page) => {
                self.detach(page);
                self.pages.remove(&page);
            }
            Event::Map(page, true) => drop(self.mapped.insert(page)),
            Event::Map(page, false) => drop(self.mapped.remove(&page)),
            Event::Destroy(domain) => {
                let pages: Vec<_> = self.pages.keys().filter(|page| page.domain == domain).copied().collect();
                for page in pages {
                    self.act(Event::Release(page));
                }
                self.names.remove(&domain);
            }
            _ => {}
        }
    }

    /// The first step of a write: gives the page a frame of its own. Returns false if the hypervisor has no memory for
    /// a copy. Then the guest waits.
    fn make_own(&mut self, page: GuestPage) -> bool {
        let number = self.pages[&page].0;
        let frame = self.frames.get_mut(&number).unwrap();
        if frame.pages.len() > 1 {
            if self.free == 0 {
                return false;
            }
            self.free -= 1;
            let content = frame.content;
            self.detach(page);
            let copy = self.allocate(content);
            self.attach(page, copy);
        } else {
            frame.handle = None;
        }
        true
    }

    /// Panics if a guest would read anything other than what it wrote.
    pub fn check(&self) {
        for (page, (number, known)) in &self.pages {
            assert_eq!(self.frames[number].content, *known, "{page:?} holds what it must not");
        }
    }

    /// How many pages sharing has freed.
    pub fn saved(&self) -> u64 {
        self.pages.len() as u64 - self.frames.len() as u64
    }

    fn next(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.act(event);
        }
    }

    fn frame(&self, page: GuestPage) -> Result<&Frame, CallError> {
        if !self.names.contains_key(&page.domain) {
            return Err(CallError::Ended);
        }
        let (number, _) = self.pages.get(&page).ok_or(CallError::Unfit)?;
        Ok(&self.frames[number])
    }
}

impl Hypervisor for Model {
    fn domains(&mut self) -> Result<Vec<Domain>, CallError> {
        self.next();
        let mut domains = Vec::new();
        for &id in self.names.keys() {
            let mut own = Pages(0);
            let mut shared = Pages(0);
            for (page, (number, _)) in &self.pages {
                if page.domain != id {
                    continue;
                }
                let pages = if self.frames[number].handle.is_some() { &mut shared } else { &mut own };
                pages.0 += 1;
            }
            let uuid = [u8::try_from(id.0).unwrap(); 16];
            let most = own + shared;
            let lacking = Pages(u64::from(self.lacking.contains(&id)));
            domains.push(Domain { id, uuid, ended: false, hvm: true, hap: true, own, most, shared, lacking, vcpus: 1 });
        }
        Ok(domains)
    }

    fn name(&mut self, domain: DomainId) -> Option<String> {
        self.names.get(&domain).cloned()
    }

    fn kernel(&mut self, _: DomainId) -> Option<String> {
        None
    }

    fn memory(&mut self) -> Result<MachineMemory, CallError> {
        let nominated = self.frames.values().filter(|frame| frame.handle.is_some()).count() as u64;
        let total = Pages(self.free + self.frames.len() as u64);
        Ok(MachineMemory { total, free: Pages(self.free), saved: Pages(self.saved()), frames: Pages(nominated) })
    }

    fn enable(&mut self, domain: DomainId) -> Result<(), Refusal> {
        if self.refusing.contains(&domain) { Err(Refusal::Passthrough) } else { Ok(()) }
    }

    fn disable(&mut self, _: DomainId) {}

    fn last_frame(&mut self, domain: DomainId) -> Result<Gfn, CallError> {
        self.next();
        let last = self.pages.keys().rfind(|page| page.domain == domain).ok_or(CallError::Ended)?;
        Ok(last.frame)
    }

    fn populated(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError> {
        assert!(!self.lacking.contains(&domain), "the hypervisor ends {domain}: it has no memory to populate it");
        self.asked += frames.len() as u64;
        Ok(frames.iter().map(|&frame| self.pages.contains_key(&GuestPage { domain, frame })).collect())
    }

    fn read(&mut self, domain: DomainId, frames: &[Gfn], see: &mut See<'_>) -> Result<(), CallError> {
        self.next();
        assert!(!self.lacking.contains(&domain), "the hypervisor ends {domain}: it has no memory to populate it");
        if !self.names.contains_key(&domain) {
            return Err(CallError::Ended);
        }
        for (at, &frame) in frames.iter().enumerate() {
            self.mappings += 1;
            match self.frame(GuestPage { domain, frame }) {
                Ok(frame) => see(at, Some(&[frame.content; 4096])),
                Err(_) => see(at, None),
            }
            self.next();
        }
        Ok(())
    }

    fn unshare(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError> {
        self.next();
        let mut own = Vec::new();
        for &frame in frames {
            let page = GuestPage { domain, frame };
            own.push(self.pages.contains_key(&page) && self.make_own(page));
        }
        Ok(own)
    }

    fn sharers(&mut self, page: GuestPage) -> Result<Option<u32>, CallError> {
        self.next();
        self.looked_at += 1;
        let frame = match self.frame(page) {
            Err(CallError::Unfit) => return Ok(None),
            frame => frame?,
        };
        Ok(frame.handle.map(|_| u32::try_from(frame.pages.len()).unwrap()))
    }

    fn nominate(&mut self, page: GuestPage) -> Result<Handle, CallError> {
        self.next();
        self.nominations += 1;
        if let Some(handle) = self.frame(page)?.handle {
            return Ok(handle);
        }
        if self.mapped.contains(&page) {
            return Err(CallError::Busy);
        }
        if self.free == 0 {
            return Err(CallError::NoMemory);
        }
        self.last_handle += 1;
        let handle = Handle(self.last_handle);
        let number = self.pages[&page].0;
        self.frames.get_mut(&number).unwrap().handle = Some(handle);
        Ok(handle)
    }

    fn share(&mut self, source: Nominated, client: Nominated) -> Result<(), CallError> {
        self.next();
        self.shares += 1;
        self.frame(source.page).map_err(|_| CallError::Ended)?;
        self.frame(client.page).map_err(|_| CallError::Ended)?;
        let (source_number, client_number) = (self.pages[&source.page].0, self.pages[&client.page].0);
        if source_number == client_number {
            return Ok(());
        }
        if self.frames[&source_number].handle != Some(source.handle) {
            return Err(CallError::SourceChanged);
        }
        if self.frames[&client_number].handle != Some(client.handle) {
            return Err(CallError::ClientChanged);
        }
        let domains = [source.page.domain, client.page.domain];
        let clients = self.frames[&client_number].pages.clone();
        assert!(
            clients.iter().all(|page| domains.contains(&page.domain)),
            "BUG: the client's frame is also mapped by another guest"
        );
        let others = self.frames[&source_number].pages.iter().any(|page| page.domain != client.page.domain);
        assert!(domains[0] != domains[1] || !others, "within a guest, with a frame of another guest");
        for page in clients {
            self.detach(page);
            self.attach(page, source_number);
            self.free += 1;
        }
        Ok(())
    }
}
