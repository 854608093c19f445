"""The storage engine ``file``: objects as files on a local disk, or on a filesystem that several nodes mount.

    ROOT/format                                         what wrote here
    ROOT/objects/NAMESPACE-LAYOUT/label                 what operators call the scope
    ROOT/objects/NAMESPACE-LAYOUT/3 HEX/KEY.PART        an object: 4 KiB of header, then its pages, on borders of 4 KiB
    ROOT/daemons/ID/lock                                held by a living daemon; ID/* is what it is writing

An object gets its name when all of it is written, by a rename, so a daemon that dies at any byte leaves a nameless file
behind, which the next one removes. Evicted files of the right size are written over, where freeing one and allocating
another took 1.7 times as long on the disk that was measured.
"""
