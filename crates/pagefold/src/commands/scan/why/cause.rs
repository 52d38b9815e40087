//! Why memory is out of KSM's or pagefold's reach, and who decides that.

use pagefold_host::scope::exclude::Exclusion;
use pagefold_procmem::maps::VmaDetail;
use serde::Serialize;

/// Why nobody merges a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Shared mappings: anonymous, or of a memfd, a tmpfs file or a SysV segment.
    SharedMemory,
    /// Shared mappings of files on disk.
    SharedFile,
    Hugetlb,
    Userfaultfd,
    Locked,
    Pinned,
    DontDump,
    WipeOnFork,
    /// Pages of private mappings of files on disk that the process hasn't written to.
    PageCache,
    /// Pages of private mappings of tmpfs files that the process hasn't written to.
    Tmpfs,
    /// Mergeable pages whose copies are all out of reach.
    Copies,
}

/// Why a mapping's pages are out of reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Causes {
    /// `None`: the anonymous pages can be merged.
    pub anonymous: Option<Cause>,
    /// `None`: we don't examine the pages of the mapped file.
    pub file: Option<Cause>,
}

impl Causes {
    /// The causes for a mapping, given the result of [`vma_exclusion`](pagefold_host::scope::exclude::vma_exclusion).
    /// `None` if we can't examine the mapping's pages, for example a device's.
    pub fn of(detail: &VmaDetail, exclusion: Option<&Exclusion>) -> Option<Self> {
        let has_file = detail.vma.inode != 0;
        let mut file = has_file.then_some(Cause::PageCache);
        // Hugetlb mappings also have flags that other exclusions look for, so test for hugetlb first.
        if detail.flags.has(*b"ht") {
            return Some(Self { anonymous: Some(Cause::Hugetlb), file: Some(Cause::Hugetlb) });
        }
        let anonymous = match exclusion {
            None | Some(Exclusion::NothingAnonymous) => None,
            Some(Exclusion::Shared) => {
                file = Some(Cause::SharedFile);
                file
            }
            Some(Exclusion::UserFault) => Some(Cause::Userfaultfd),
            Some(Exclusion::Locked) => Some(Cause::Locked),
            Some(Exclusion::Pinned) => Some(Cause::Pinned),
            Some(Exclusion::DontDump) => Some(Cause::DontDump),
            Some(Exclusion::WipeOnFork) => Some(Cause::WipeOnFork),
            Some(_) => return None,
        };
        Some(Self { anonymous, file })
    }
}

impl Cause {
    pub const ALL: [Self; 11] = [
        Self::SharedMemory,
        Self::SharedFile,
        Self::Hugetlb,
        Self::Userfaultfd,
        Self::Locked,
        Self::Pinned,
        Self::DontDump,
        Self::WipeOnFork,
        Self::PageCache,
        Self::Tmpfs,
        Self::Copies,
    ];

    /// The cause that replaces this one if the mapped file turns out to be in memory (as on a tmpfs).
    #[must_use]
    pub fn in_memory(self) -> Self {
        match self {
            Self::SharedFile => Self::SharedMemory,
            Self::PageCache => Self::Tmpfs,
            other => other,
        }
    }

    /// Whether processes that map the same frame share it by mapping the same file, rather than by a fork.
    pub fn is_of_file(self) -> bool {
        matches!(self, Self::SharedMemory | Self::SharedFile | Self::PageCache | Self::Tmpfs)
    }

    /// Whether we read the contents. We don't if they're wiped on fork, since programs keep keys there.
    pub fn is_read(self) -> bool {
        self != Self::WipeOnFork
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared memory (memfd, tmpfs or SysV, mapped MAP_SHARED)",
            Self::SharedFile => "shared mappings of files",
            Self::Hugetlb => "hugetlb pages",
            Self::Userfaultfd => "registered with userfaultfd",
            Self::Locked => "locked (mlock)",
            Self::Pinned => "pinned for I/O",
            Self::DontDump => "kept out of core dumps (MADV_DONTDUMP)",
            Self::WipeOnFork => "kept from child processes (MADV_WIPEONFORK)",
            Self::PageCache => "page cache of different files with equal contents",
            Self::Tmpfs => "different files of a tmpfs with equal contents",
            Self::Copies => "mergeable, but all copies are out of reach",
        }
    }

    /// What would bring the memory within reach: the program to configure, and the setting.
    pub fn remedies(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::SharedMemory => &[
                ("QEMU", "share=off (memory-backend-memfd has share=on by default)"),
                ("libvirt", "<source type='anonymous'/>, no <access mode='shared'/>"),
                ("Cloud Hypervisor", "shared=off,mergeable=on; no vhost-user, virtio-fs"),
                ("Firecracker", "no vhost-user drives"),
                ("Kata", "shared_fs = \"none\" or another without virtio-fs"),
                ("gVisor", "nothing: a sandbox's memory is one memfd"),
                ("JVM", "another collector than ZGC, whose heap is a memfd"),
            ],
            Self::SharedFile => &[
                ("QEMU", "memory-backend-file with share=off"),
                ("Cloud Hypervisor", "--memory-zone with shared=off"),
                ("Programs", "MAP_PRIVATE, if nobody needs to see the writes"),
            ],
            Self::Hugetlb => &[
                ("QEMU", "memory-backend-ram; no mem-path on hugetlbfs, no hugetlb=on"),
                ("libvirt", "no <hugepages/>"),
                ("Cloud Hypervisor", "hugepages=off (thp=on stays mergeable)"),
                ("Firecracker", "huge_pages: None in machine-config"),
                ("Kata", "enable_hugepages = false"),
                ("JVM", "-XX:+UseTransparentHugePages, not -XX:+UseLargePages"),
            ],
            Self::Userfaultfd => &[
                ("Firecracker", "mem_backend with backend_type File, not Uffd"),
                ("QEMU", "passes with the end of postcopy or of a background snapshot"),
                ("CRIU", "restore without --lazy-pages"),
            ],
            Self::Locked => &[
                ("QEMU", "-overcommit mem-lock=off"),
                ("libvirt", "no <locked/>"),
                ("Elasticsearch", "bootstrap.memory_lock: false"),
            ],
            Self::Pinned => &[
                ("QEMU, Cloud Hypervisor", "no VFIO devices: they pin all of a guest"),
                ("Programs", "fewer registered buffers (io_uring, RDMA)"),
            ],
            Self::DontDump => {
                &[("QEMU", "-machine dump-guest-core=on"), ("Programs", "MADV_DODUMP, if these are no secrets")]
            }
            Self::WipeOnFork => &[("Programs", "nothing should: these may be keys")],
            Self::PageCache => &[
                ("Containers", "images that share layers (overlayfs; no copies, no vfs)"),
                ("Files", "hard links or bind mounts; reflinks have a page cache each"),
                ("Firecracker", "one snapshot file for all clones"),
                ("Kata", "vm_rootfs_driver = \"virtio-pmem\", one image for all"),
            ],
            Self::Tmpfs => &[("Files", "one file for all, by hard link or bind mount")],
            Self::Copies => &[("Copies", "see the causes above")],
        }
    }
}
