"""Records of compilations, collected for reports."""
