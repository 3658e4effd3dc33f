"""Who may do what: users and their rights, what each request needs, quotas. Pure but for the reading of files."""
