"""Real memory nodes on a machine that has one: a guest under software emulation, and what must hold in it.

    python -m tests.numa_guest            # 2, 3 and 4 nodes, from the checkout
    python -m tests.numa_guest 2 --only mremap

On the host:

    packages.py    QEMU, a kernel and busybox, from Debian's packages into the user's cache folder; nothing is installed
    image.py       a disk image of this Python and of the packages that Expertile requires, cached by their versions
    guest.py       boots a guest of N nodes; Expertile's own sources travel in its initial ramdisk
    harness.py     runs the checks of one boot, and turns what the guest prints into results

In the guest:

    scenarios.py   which checks run on which placement, one JSON line for each
    placements.py  the ways in which memory gets onto nodes, each with the kernel's rule
    checks.py      what must hold of placed memory: page map, topology, a layer's result and what it reads from where
    layers.py      a small layer in placed memory
    memory.py      the system calls, called here once more so that they don't depend on what they check
"""
