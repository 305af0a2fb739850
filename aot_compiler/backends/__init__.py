"""Back ends: from an HLO module in normal form to a target's program."""
