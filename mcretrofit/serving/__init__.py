"""A model behind OpenAI's HTTP interface: what is asked (`asked`), the model's turns (`engine`),
chat as text (`chat`), and the routes (`app`)."""
