"""Secure sums: a server learns the sum of what members send, and nothing else about any of them.

The protocol is that of Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving
Machine Learning" (Figure 4). With fewer `neighbours` than members it is that of Bell et al. 2020,
"Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (SecAgg+). A round has four
stages, each of which any member may fail to reach:

| stage | a member sends | the server sends back |
|---|---|---|
| keys | two public keys | the keys of its neighbours |
| shares | shares of its two secrets, encrypted to each neighbour | the shares it was sent |
| masked | its values + its own mask + a mask with each neighbour | who of its neighbours arrived |
| unmasking | of each neighbour one share: of its own mask, or of its key if it is gone | |

Masks between two members cancel in the sum. Those of a member that is gone are computed from its
key, and the own mask of every other member from its seed. Nobody ever gives away both kinds of
shares of one member: the own mask protects what was sent too late to count.

    terms         what server and members agree on: who, how many, how the values are written
    member        what a member does in each stage
    server        what the server does in each stage
    local         all members and the server in one process, for simulations and tests
    graph         who shares secrets and masks with whom
    messages      the bytes that travel, and the checks of what arrives
    fixed_point   values as whole numbers modulo 2^32 or 2^64
    shamir        secrets in shares, of which a threshold is needed
    primitives    key agreement, key derivation, encryption and the expansion of masks
    flat_uploads  the groups of an upload as one vector
    simulated     secure sums in a simulated run
"""
