"""Host pages of other nodes: one daemon lends, another one reads.

    borrower                                    lender
    Borrow(names)          ── control ──▶       pins what it has on the host, backs up what is on a device alone
                           ◀──────────────      a lease, a secret, where its bytes are to be had
    secret, numbers        ── bytes ────▶       what is being copied to the host is sent once it is there
                           ◀──────────────      header, page; header, page; ...       each verified in its host page
    Beat until all is asked for, Return         pins go; they go too when neither a beat nor bytes renew the lease

The reader owns the destination and reads by itself, so no byte of a dead or late peer lands in memory that is another's
by now. The lender sends from pinned pages and unpins only when no stream sends from them any more. No memory is open to
a host that reaches a port: bytes go out for a secret of 256 bits that is good for a few connections of one lease.

Bytes have one seam: ``Lender`` with ``LoanDesk`` on one side, ``PeerStorage``'s read of a taken loan on the other. A
data path by RDMA beside TCP must promise what these do. Late pages: a read that the borrower gave up keeps its pages
out of use (LATE, then quarantine) until the library says that no write is under way; a release that did not raise
says nothing. Registered memory: only pages under a lease can be read, by a key that ends with the lease, and none can
be written. A silent peer: a deadline for each read counted by the borrower, since a stopped process is not noticed by
the transport. Header and checksum are compared in the borrower's page as they are now.
"""
