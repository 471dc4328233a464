"""The tuner: studies over scheduler settings, paired comparison, choice and export."""
