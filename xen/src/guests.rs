//! Which guests are in scope, and which ones we must leave alone.

use crate::hypervisor::{Domain, DomainId, Hypervisor};
use pagefold::commands::run::progress::LeftAlone;
use pagefold_engine::units::Pages;
use pagefold_text::escape::printable;
use std::fmt;
use std::str::FromStr;

/// The trust domain of guests without one.
pub const DEFAULT_TRUST: &str = "default";

/// A guest as an operator names it: `NAME`, `ID`, or either with `@TRUST`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// Its name or number.
    pub guest: String,
    /// Its trust domain: guests share memory within one domain only.
    pub trust: String,
}

impl FromStr for Selected {
    type Err = SelectError;

    fn from_str(text: &str) -> Result<Self, SelectError> {
        let (guest, trust) = text.rsplit_once('@').unwrap_or((text, DEFAULT_TRUST));
        if guest.is_empty() || trust.is_empty() || text.contains(char::is_control) {
            return Err(SelectError::Malformed(text.escape_debug().to_string()));
        }
        if guest == "0" || guest == "Domain-0" {
            return Err(SelectError::Dom0);
        }
        Ok(Self { guest: guest.to_owned(), trust: trust.to_owned() })
    }
}

impl fmt::Display for Selected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.guest)?;
        if self.trust == DEFAULT_TRUST { Ok(()) } else { write!(f, "@{}", self.trust) }
    }
}

impl Selected {
    fn is(&self, domain: DomainId, name: Option<&str>) -> bool {
        // If a guest's name is only digits and equals another guest's number, the number counts.
        match self.guest.parse::<u16>() {
            Ok(number) => number == domain.0,
            Err(_) => name == Some(self.guest.as_str()),
        }
    }
}

/// Why we can't select guests by these names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// The text is not a name or number.
    #[error("\"{0}\" is not a guest's name or number, nor one with @ and a trust domain behind it")]
    Malformed(String),
    #[error("the memory of dom0 cannot be shared")]
    Dom0,
    /// There's no guest of this name or number.
    #[error("there is no guest \"{0}\"")]
    Unknown(String),
    /// The user names the same guest twice, in different trust domains.
    #[error("guest {0} is named twice, in different trust domains")]
    Contradiction(String),
}

/// A guest in scope.
#[derive(Clone, Debug)]
pub struct InScope {
    /// What the hypervisor's list says about it.
    pub domain: Domain,
    pub name: String,
    /// The name of its trust domain.
    pub trust: String,
}

impl InScope {
    /// Our report that we leave the guest alone.
    pub fn left_alone(&self, reason: &str) -> LeftAlone {
        let name = printable(self.name.as_bytes());
        LeftAlone { pid: self.domain.id.0.into(), name, reason: reason.to_owned() }
    }
}

/// Finds the guests in scope among the existing ones.
pub fn in_scope(
    hypervisor: &mut impl Hypervisor,
    scope: &[Selected],
    domains: Vec<Domain>,
) -> Result<Vec<InScope>, SelectError> {
    let mut found = Vec::new();
    for domain in domains {
        // Number 0 is dom0.
        if domain.id.0 == 0 || domain.ended {
            continue;
        }
        let name = hypervisor.name(domain.id);
        let selected: Vec<_> = scope.iter().filter(|selected| selected.is(domain.id, name.as_deref())).collect();
        let Some(first) = selected.first() else { continue };
        let name = name.unwrap_or_else(|| domain.id.to_string());
        if selected.iter().any(|other| other.trust != first.trust) {
            return Err(SelectError::Contradiction(name));
        }
        found.push(InScope { domain, name, trust: first.trust.clone() });
    }
    Ok(found)
}

/// The first named guest that doesn't exist.
pub fn missing<'a>(scope: &'a [Selected], found: &[InScope]) -> Option<&'a Selected> {
    scope.iter().find(|selected| !found.iter().any(|guest| selected.is(guest.domain.id, Some(&guest.name))))
}

/// Why we can't share this guest's memory. `None` if we can.
pub fn unfit(domain: &Domain) -> Option<&'static str> {
    if !domain.hvm {
        Some("it is a PV guest; only memory of HVM and PVH guests can be shared")
    } else if !domain.hap {
        Some("it does not use hardware-assisted paging (hap)")
    } else if domain.lacking > Pages(0) {
        // Looking at a page populates it, and if a guest has no memory left for that, the hypervisor ends the guest.
        Some("its balloon driver has not yet given back what it has above its memory (maxmem)")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    fn selected(texts: &[&str]) -> Vec<Selected> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn found(scope: &[&str]) -> Result<Vec<(u16, String)>, SelectError> {
        let mut model = Model::new(0);
        for (number, name) in [(1, "web"), (2, "db"), (3, "2")] {
            model.create(number, name, &[0]);
        }
        let domains = model.domains().unwrap();
        let guests = in_scope(&mut model, &selected(scope), domains)?;
        Ok(guests.into_iter().map(|guest| (guest.domain.id.0, guest.trust)).collect())
    }

    #[test]
    fn guests_are_named_by_name_or_number() {
        let default = || DEFAULT_TRUST.to_owned();
        assert_eq!(found(&["web", "2"]).unwrap(), [(1, default()), (2, default())]);
        assert_eq!(found(&["db@a", "3@b"]).unwrap(), [(2, "a".to_owned()), (3, "b".to_owned())]);
        assert_eq!(found(&["none"]).unwrap(), []);
        assert_eq!(found(&["db@a", "2@b"]), Err(SelectError::Contradiction("db".to_owned())));
    }

    #[test]
    fn what_is_no_guest_is_refused() {
        for bad in ["", "@", "web@", "@a", "a\nb"] {
            assert!(matches!(bad.parse::<Selected>(), Err(SelectError::Malformed(_))), "{bad}");
        }
        for dom0 in ["0", "Domain-0", "0@a"] {
            assert_eq!(dom0.parse::<Selected>(), Err(SelectError::Dom0));
        }
        assert_eq!(selected(&["a@b@c"])[0].to_string(), "a@b@c");
        assert_eq!(selected(&["a@b@c"])[0].trust, "c");
    }

    #[test]
    fn guests_that_do_not_exist_are_known() {
        let mut model = Model::new(0);
        model.create(1, "web", &[0]);
        let domains = model.domains().unwrap();
        let scope = selected(&["1", "db"]);
        let guests = in_scope(&mut model, &scope, domains).unwrap();
        assert_eq!(missing(&scope, &guests), Some(&scope[1]));
        assert_eq!(missing(&scope[..1], &guests), None);
    }

    #[test]
    fn guests_of_other_kinds_are_left_alone() {
        let domain = Domain { hvm: true, hap: true, ..Domain::default() };
        assert_eq!(unfit(&domain), None);
        assert!(unfit(&Domain { hvm: false, ..domain.clone() }).unwrap().contains("PV"));
        assert!(unfit(&Domain { hap: false, ..domain.clone() }).unwrap().contains("hap"));
        assert!(unfit(&Domain { lacking: Pages(1), ..domain }).unwrap().contains("balloon"));
    }
}
