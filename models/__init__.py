"""Networks and the masks that keep their tasks apart."""
