"""Why a defence does what it does, in pictures (explain), and what to turn (doctor)."""
