"""The supervisor of one node: ranks started, watched and judged, and the seat at the rendezvous."""
