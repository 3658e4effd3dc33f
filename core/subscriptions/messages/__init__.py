"""Where each message of a subscription is: fresh, leased to a subscriber, or waiting with a record."""
