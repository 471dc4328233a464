"""What the simulator is asked before and during a live study, and how far it may be believed."""
