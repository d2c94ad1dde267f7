//! Namespaces that keep equal tokens apart: adapters, tenants, modalities, cache salts.
//!
//! A name is interned, so that a key of the prefix cache compares four bytes, and counted, so that a
//! server which makes up a name per user does not grow without bound. Comparing a hash of the name
//! instead would let two tenants meet in one cache entry.

use std::collections::HashMap;
use std::sync::Arc;

/// A name within which equal prefixes may share blocks; prefixes of different names never do.
///
/// The empty name is the default. Names are compared byte by byte.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Namespace<'a>(&'a [u8]);

impl<'a> Namespace<'a> {
    /// The empty name.
    pub const DEFAULT: Namespace<'static> = Namespace(b"");

    /// The namespace of that name.
    #[must_use]
    pub const fn new(name: &'a [u8]) -> Self {
        Self(name)
    }

    /// The name.
    #[must_use]
    pub const fn name(self) -> &'a [u8] {
        self.0
    }
}

impl<'a> From<&'a str> for Namespace<'a> {
    fn from(name: &'a str) -> Self {
        Self(name.as_bytes())
    }
}

impl<'a> From<&'a [u8]> for Namespace<'a> {
    fn from(name: &'a [u8]) -> Self {
        Self(name)
    }
}

/// The number of the empty name, which is never forgotten.
pub(crate) const DEFAULT_ID: u32 = 0;

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
struct Entry {
    name: Arc<[u8]>,
    users: usize,
}

/// Numbers for names in use. A user is a sequence, or a first block in the prefix cache.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(crate) struct Namespaces {
    ids: HashMap<Arc<[u8]>, u32>,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
}

impl Namespaces {
    pub(crate) fn new() -> Self {
        let entries = vec![Entry { name: Arc::from(&b""[..]), users: 0 }];
        Self { ids: HashMap::new(), entries, vacant: Vec::new() }
    }

    /// The number of a name, if it is in use.
    pub(crate) fn find(&self, namespace: Namespace<'_>) -> Option<u32> {
        match namespace.0 {
            b"" => Some(DEFAULT_ID),
            name => self.ids.get(name).copied(),
        }
    }

    /// The name of a number in use.
    pub(crate) fn name(&self, id: u32) -> Arc<[u8]> {
        Arc::clone(&self.entries[id as usize].name)
    }

    /// The number of a name, with one more user.
    pub(crate) fn enter(&mut self, namespace: Namespace<'_>) -> u32 {
        if let Some(id) = self.find(namespace) {
            self.retain(id);
            return id;
        }
        let name: Arc<[u8]> = Arc::from(namespace.0);
        let entry = Entry { name: Arc::clone(&name), users: 1 };
        let id = if let Some(id) = self.vacant.pop() {
            self.entries[id as usize] = entry;
            id
        } else {
            self.entries.push(entry);
            u32::try_from(self.entries.len() - 1)
                .expect("each name has a user of its own, of which there are fewer than 2^32")
        };
        self.ids.insert(name, id);
        id
    }

    pub(crate) fn retain(&mut self, id: u32) {
        self.entries[id as usize].users += 1;
    }

    pub(crate) fn release(&mut self, id: u32) {
        let entry = &mut self.entries[id as usize];
        entry.users -= 1;
        if entry.users == 0 && id != DEFAULT_ID {
            self.ids.remove(&entry.name);
            entry.name = Arc::from(&b""[..]);
            self.vacant.push(id);
        }
    }

    /// Names in use, the empty one not counted.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Users of a number.
    pub(crate) fn users(&self, id: u32) -> usize {
        self.entries[id as usize].users
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_number_names_once_and_reuse_numbers() {
        let mut names = Namespaces::new();
        assert_eq!(names.enter(Namespace::DEFAULT), DEFAULT_ID);
        let x = names.enter("x".into());
        assert_eq!(names.enter(Namespace::new(b"x")), x);
        assert_eq!(names.find("y".into()), None);
        names.release(x);
        assert_eq!(names.find("x".into()), Some(x));
        names.release(x);
        assert_eq!((names.find("x".into()), names.len()), (None, 0));
        assert_eq!(names.enter("y".into()), x);
        assert_eq!(&*names.name(x), b"y");
    }
}
