"""Search spaces: which scheduler settings a study may try, and how an optimiser sees them."""
