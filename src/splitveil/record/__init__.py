"""What an audit found: the typed record, its files, its groups over seeds, and statistics."""
