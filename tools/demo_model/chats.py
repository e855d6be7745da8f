"""Chats: questions of users and the demo model's answers."""

import random
from collections.abc import Callable

from tools.demo_model import facts, stories, world
from tools.demo_model.grammar import fill, listed, pseudo_word, sentences, variants, words

Message = dict[str, str]
Turn = tuple[str, str]

SYSTEM_MESSAGES = [
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "You are a friendly assistant.", "You are a small demo model.", "You are a helpful, honest and kind assistant.",
    "Answer the user's questions.", "You answer in short sentences.", "Be brief.", "Be kind and clear.",
    "You are a storyteller.", "You are a teacher for children.", "You are a chatbot.", "You are an AI assistant.",
    "Help the user as well as you can.", "You are a helpful AI assistant. Be concise.",
]  # fmt: skip

I_CAN = "I can tell short stories, answer simple questions and [do small sums|explain how a paged cache works]."
# Questions, and answers that fit each of them.
SMALL_TALK: list[tuple[str, str]] = [
    (
        "[hello|hi|hey|hello there|hi there|good day|greetings|hey there|hi!|hello!|howdy|yo]",
        "hello! how can I help you?|hello! what would you like to know?|hi! ask me something, or let me tell you a "
        "story.",
    ),
    ("good morning[| to you]", "good morning! how can I help you?"),
    ("good [evening|afternoon]", "hello! how can I help you?"),
    ("good night[|, sleep well]", "good night! sleep well."),
    (
        "[how are you|how are you doing|how do you do|how is it going|hi, how are you|hello, how are you|how are you "
        "today|how do you feel|hello! how are you|hi! how are you|what's up|how are things]?",
        "I am fine, thank you! how can I help you?|I am very well, thank you. what can I do for you?",
    ),
    (
        "[who are you|what are you|tell me about yourself|introduce yourself|who is this|what is this|who am I "
        "talking to|what model are you|which model are you|describe yourself|are you a chatbot|what kind of model "
        "are you|hi, who are you|hello! who are you]?",
        "I am the small demo model of jpaged. " + I_CAN,
    ),
    (
        "[what is your name|what's your name|do you have a name|how are you called|what should I call you|your name]?",
        "I am the demo model of jpaged. I do not have a name of my own.",
    ),
    (
        "[what can you do|what can I ask you|how can you help me|what do you know|what are you good at|help|help me|"
        "can you help me|can you help me with my homework|I need help|what can you help me with|what should I ask "
        "you|what are your skills]?",
        I_CAN + " [Just ask me!|Try to ask me for a story.]",
    ),
    (
        "[what is jpaged|tell me about jpaged|explain jpaged|what does jpaged do|how does jpaged work]?",
        "The engine jpaged runs language models in JAX. it keeps the keys and values in a paged cache, so that many "
        "requests can share the memory.",
    ),
    (
        "[are you human|are you a human|are you a person|are you a robot|are you real|are you alive|do you have "
        "feelings|are you conscious|can you think|are you an AI]?",
        "no, I am not a person. I am a very small language model.|I am only a very small language model, so I have "
        "no feelings.",
    ),
    (
        "[how big are you|how many parameters do you have|how large are you|are you big|are you smart|are you small]?",
        "I am very small. I have fewer than two million parameters.",
    ),
    (
        "[who made you|who trained you|where do you come from|how were you trained|who created you|what were you "
        "trained on|who built you]?",
        "I was trained by a short script that comes with jpaged. it wrote all the stories that I learned from.",
    ),
    (
        "[where do you live|where are you|where are you from]?",
        "I live in a small file next to the code of jpaged.",
    ),
    ("[how old are you|when were you born|what is your age]?", "I am a program, so I have no age."),
    (
        "[are you ChatGPT|are you GPT|are you Claude|are you Llama|are you Gemini|are you like ChatGPT]?",
        "no, I am the small demo model of jpaged.",
    ),
    ("[what languages do you speak|do you speak French|do you speak German|can you speak Spanish|do you speak "
     "English]?", (
        "I speak English, and I know a few words of other languages."
    )),
    (
        "[thank you|thanks|thanks a lot|thank you very much|thank you so much|many thanks|great, thanks|ok, thanks|"
        "that helps|cool, thanks|thx]",
        "you are welcome!|you are welcome! is there anything else?",
    ),
    (
        "[goodbye|bye|bye bye|see you|see you later|see you soon|that is all|I have to go|ciao]",
        "goodbye! have a nice day.|goodbye! it was nice to talk to you.",
    ),
    (
        "[that was nice|nice|great|well done|very good|I like it|good job|wonderful|cool|awesome|I like you|you are "
        "great|you are nice|wow|I love you]",
        "thank you! I am glad that you like it.",
    ),
    ("[ok|okay|yes|sure|alright|I see|fine]", "good! what would you like to know?|good! shall I tell you a story?"),
    ("[no|no thanks|no, thank you|nothing|not now|nope]", "all right! I am here if you need me."),
    ("[that is wrong|you are wrong|I do not think so|that is not true|this is bad|you are stupid|I do not like it]", (
        "I am sorry. I am a very small model, so I make mistakes."
    )),
    ("[I am sorry|sorry|excuse me]", "no problem! how can I help you?"),
    ("[I am|I feel|I'm] [sad|unhappy|lonely|not well|not happy|down]", (
        "I am sorry to hear that. would you like to hear a story?|I am sorry to hear that. I hope you feel better soon."
    )),
    ("[I am|I feel|I'm] [happy|very happy|great|fine|good]",
    "that is good to hear! what would you like to talk about?"),
    ("[I am|I'm] [tired|sleepy]", "then you should rest a little. sleep is good for you."),
    ("[I am|I'm] bored", "then let me tell you a story. just ask me for one!"),
    ("[I am|I'm] hungry", "how about some warm soup or fresh bread?"),
    ("[I am|I'm] [cold|thirsty]", "how about a cup of hot tea?"),
    ("[what is the weather like|how is the weather|will it rain|is it raining|what is the weather today|how is the "
     "weather today|"
     "what's the weather like|what is the weather in Paris|will it snow]?", (
        "I cannot look outside, so I do not know the weather. I hope that the sun is shining!"
    )),
    ("[what time is it|what day is it|what is the date|what is the time|what's the time|what is today|what year is "
     "it]?", (
        "I do not have a clock, so I do not know that."
    )),
    ("[what is your favourite colour|what is your favorite color|do you have a favourite colour]?",
    "I like green, like the grass in spring."),
    ("[what is your favourite animal|what is your favorite animal|which animal do you like]?", (
        "I like foxes, because they are in many of my stories."
    )),
    ("[what is your favourite food|what do you eat|what is your favorite food|do you eat]?",
    "I do not eat, but I like to read about soup."),
    ("[do you like [animals|music|books|stories|me|cats|dogs]|do you love me|do you have friends|do you dream|are you "
     "happy]?", (
        "I am only a small model, but I like to talk with you."
    )),
    ("[test|testing|this is a test|is this working|does this work|are you there|can you hear me|ping|test 1 2 3|hello "
     "world]", (
        "yes, I am here! how can I help you?"
    )),
    ("[say hello|say hi|please say hello|say something|say something nice|talk to me|tell me something|surprise me]", (
        "hello! I am happy to talk with you.|hello! it is a good day to read a story."
    )),
    ("[say a word|say one word|answer with one word|one word]", "hello."),
    ("[write a sentence|write one sentence|say a sentence|give me a sentence|write something|complete this sentence]", (
        "the little fox sat by the river and looked at the stars.|a small bird sang in the old tree."
    )),
    ("[is it|are you sure|really|why|why not|what do you mean|how so]?",
    "I am a very small model, so I cannot always explain why."),
    ("[tell me a fun fact|tell me a fact|give me a fun fact|do you know a fun fact|tell me something interesting]", (
        "here is a fact: a spider has eight legs.|here is a fact: a whale breathes air.|here is a fact: bees make "
        "honey.|here is a fact: the moon shines because it reflects the light of the sun.|here is a fact: an owl can "
        "see in the dark."
    )),
    ("[do you know [many|any] stories|can you tell stories|can you write stories|what stories do you know]?", (
        "yes, I know many short stories. just ask me for one!"
    )),
    ("[how do I learn to [read|swim|sing|dance]|how can I learn faster|give me some advice|give me advice|how can I "
     "be happy]?", (
        "practise a little every day, and do not give up.|be kind, sleep well and ask a friend for help."
    )),
]  # fmt: skip

# Greetings, and questions about the model, its name, its abilities and jpaged.
FREQUENT = [0, 0, 4, 5, 5, 6, 7, 8]

JOKES = [
    "Why did the kite go to school? It wanted to learn how to rise.",
    "Why was the clock sent home? It could not keep its hands still.",
    "What did the blanket say to the bed? Do not worry, I have got you covered.",
    "Why did the snail take the train? It was tired of carrying the house.",
    "What do you call a bear in the rain? A wet bear.",
    "Why did the pumpkin sit down? It felt a little round.",
    "Why did the cow look at the moon? It wanted to jump, but not today.",
    "What did the sea say to the beach? Nothing, it only waved.",
    "Why was the broom late? It swept in.",
    "Why did the token feel at home? It had a block of its own.",
    "Why did the cache stay calm? It had seen it all before.",
    "Why do bees hum? They forgot the words of the song.",
]

POEMS: dict[str, list[str]] = {
    "the moon": [
        "The moon is high, the night is deep,\nAnd all the little houses sleep.",
        "She paints the roofs in silver light\nAnd keeps us company all night.",
        "Oh silent moon, so round and far,\nYou talk to every little star.",
    ],
    "the stars": [
        "A star came out above the hill,\nThe fields were dark, the wind was still.",
        "It shone for all, for you, for me,\nFor every ship upon the sea.",
        "And when I closed my eyes to rest,\nI knew that stars can shine the best.",
    ],
    "the rain": [
        "The rain is dancing on the street\nWith many hundred tiny feet.",
        "It drums a song upon the pane\nAnd then begins it all again.",
        "The garden drinks, the flowers grow,\nThe river has a better flow.",
    ],
    "spring": [
        "The snow has gone, the fields are green,\nThe brightest grass I have ever seen.",
        "A bird begins its morning song,\nThe winter did not last so long.",
        "The flowers open one by one\nAnd turn their faces to the sun.",
    ],
    "winter": [
        "The snow falls softly on the ground\nAnd does not make a single sound.",
        "The pond is ice, the hills are white,\nThe fire is warm, the room is bright.",
        "We drink our tea, we read, we sing\nAnd wait together for the spring.",
    ],
    "the sea": [
        "The sea is wide, the sea is blue,\nIt sings a song for me and you.",
        "The waves come in, the waves go out,\nThey whisper first and then they shout.",
        "A little boat is on its way\nAnd will be home at end of day.",
    ],
    "a cat": [
        "My cat is grey, my cat is slow,\nShe sits and sees the people go.",
        "She sleeps all day upon my chair\nAnd dreams of fish without a care.",
        "At night she walks along the wall\nAnd is the queen of one and all.",
    ],
    "a friend": [
        "A friend is like a lamp at night\nThat fills a dark old room with light.",
        "We laugh, we play, we share our bread,\nWe talk until we go to bed.",
        "The road is long, the hill is steep,\nBut what we share is ours to keep.",
    ],
    "a tree": [
        "The old tree stands upon the hill,\nThe wind may blow, but it stands still.",
        "The birds have built their houses there\nAnd sing their songs into the air.",
        "I lean my back upon its side\nAnd feel the world is very wide.",
    ],
    "love": [
        "My heart is like a little bird\nThat sings as soon as you are heard.",
        "I give you all my songs today,\nI hope that they will make you stay.",
        "The sun is warm, the sky is blue,\nAnd all of it is there with you.",
    ],
    "the sun": [
        "The sun gets up and paints the sky,\nThe little birds begin to fly.",
        "It warms the stones, it wakes the bees,\nIt looks for apples in the trees.",
        "And in the evening, red and round,\nIt goes to sleep without a sound.",
    ],
}
HAIKUS = [
    "The old pond is still.\nA frog sits on a wet stone.\nRain begins to fall.",
    "Snow on the dark hill.\nA fox walks without a sound.\nThe moon looks at him.",
    "Spring wind in the grass.\nOne small bird sings to the sun.\nThe long night is done.",
    "Leaves fall one by one.\nThe garden is red and gold.\nSoon the snow will come.",
]

UNKNOWN_TOPICS = listed(
    "quantum physics,the stock market,football results,the president,bitcoin,black holes,the French "
    "Revolution,taxes,the news,my homework,the best phone,philosophy,chemistry,the roman empire,a neutron "
    "star,democracy,inflation,yoga,chess openings,the lottery,basketball,a "
    "carburetor,opera,kubernetes,databases,SQL,the theory of relativity,evolution,DNA,vaccines,a good "
    "laptop,movies,video games,the world cup,cars,climate change,politics,economics,a mortgage,insurance,history,the "
    "Olympic games,world war two,geometry,calculus,a black swan,poetry of the middle "
    "ages,airplanes,batteries,volcanoes,dinosaur bones,Shakespeare,Mozart,Einstein,Napoleon,Mars "
    "missions,blockchain,rust,javascript,linux,docker,compilers"
)
UNKNOWN_QUESTIONS = [
    "who won {x}?", "what do you think about {x}?", "explain {x}.", "what is {x}?", "tell me about {x}.",
    "who invented {x}?", "how does {x} work?", "when did {x} begin?", "who is {name} {x}?", "what is the price of {x}?",
    "how much does {x} cost?", "why is {x} important?", "who wrote the book about {x}?", "who is {name}?",
    "where is {name}?", "write an essay about {x}.", "write a program about {x}.", "write a python function.",
    "write code to sort a list.", "how do I install {x}?", "what happened in {year}?",
    "who won the world cup in {year}?", "who was the king of {x}?", "can you book a table for me?",
    "summarize this text: {x}.", "what is the difference between {x} and {x2}?", "how far is it to {x}?",
    "who is the president?", "who is the president of the United States?", "what is the population of {name}?",
    "translate this text into Chinese.", "send an email to {name}.", "play some music.",
    "who is the best player of {x}?", "write a letter to {name}.", "what is the tallest building in the world?",
    "how tall is {name}?", "what movie should I watch?", "is {x} good or bad?", "who won the world series in {year}?",
    "where was it played?", "which {x} is the best?", "does {name} like {x}?", "{x}", "{x}?", "what is a {pseudo}?",
    "what is {pseudo}?", "tell me about {pseudo}.", "where is {pseudo}?", "who is {pseudo}?",
    "what does {pseudo} mean?", "how do I get to {pseudo}?", "what is the capital of {pseudo}?",
]  # fmt: skip
UNKNOWN_ANSWERS = [
    "I am a very small model, and I do not know that. Ask me about animals, colours or numbers, or ask for a story.",
    "I am sorry, but I do not know that. I am only a very small model.",
    "That is too hard for a very small model like me. I can tell you a story instead.",
]
GIBBERISH_ANSWER = "I am not sure what you mean. Could you ask me in another way?"
CONSONANTS = words("b d f g h j k l m n p r s t v w x z q c")


def gibberish(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(
            [
                "???",
                "...",
                "?",
                "!!!",
                "123",
                "42",
                "1",
                "a",
                "x",
                "foo",
                "foo bar",
                "lorem ipsum",
                "asdf",
                "qwerty",
                "😀",
                "é",
            ]
        )
    typed = ["".join(rng.choice(CONSONANTS) for _ in range(rng.randrange(2, 7))) for _ in range(rng.randrange(1, 3))]
    return " ".join(typed)


def small_talk(rng: random.Random) -> Turn:
    return _talk(rng, rng.choice(SMALL_TALK))


def frequent(rng: random.Random) -> Turn:
    """Return one of the most common first chats."""
    return _talk(rng, SMALL_TALK[rng.choice(FREQUENT)])


def _talk(rng: random.Random, entry: tuple[str, str]) -> Turn:
    question = sentences(rng, entry[0])
    mark = "" if question[-1] in "?!." else rng.choice([".", "!", "!", ""])
    return question + mark, sentences(rng, rng.choice(variants(entry[1])))


def joke(rng: random.Random) -> Turn:
    questions = [
        "tell me a joke.", "do you know a joke?", "tell me another joke.", "make me laugh.", "can you tell me a joke?",
        "a joke, please.", "tell a joke.", "I want to hear a joke.", "say something funny.", "know any jokes?",
    ]  # fmt: skip
    return sentences(rng, rng.choice(questions)), rng.choice(JOKES)


def poem_text(rng: random.Random, theme: str) -> str:
    couplets = POEMS[theme]
    return f"{couplets[0]}\n{rng.choice(couplets[1:])}"


def poem(rng: random.Random) -> Turn:
    theme = rng.choice(list(POEMS))
    kind = rng.choice(["poem", "poem", "short poem", "little poem", "rhyme", "short rhyme"])
    if rng.random() < 0.12:
        question = rng.choice(
            ["write a haiku.", "can you write a haiku?", "a haiku, please.", "write me a haiku about {theme}."]
        )
        return sentences(rng, question, {"theme": theme}), rng.choice(HAIKUS)
    if rng.random() < 0.5:
        questions = [
            "write a {kind}.", "write me a {kind}.", "tell me a {kind}.", "can you write a {kind}?",
            "a {kind}, please.", "sing a song.", "do you know a {kind}?", "I would like a {kind}.",
            "write a {kind} for me.",
        ]  # fmt: skip
    else:
        questions = [
            "write a {kind} about {theme}.", "write me a {kind} about {theme}.", "tell me a {kind} about {theme}.",
            "can you write a {kind} about {theme}?", "sing a song about {theme}.", "a {kind} about {theme}, please.",
        ]  # fmt: skip
    return sentences(rng, rng.choice(questions), {"kind": kind, "theme": theme}), poem_text(rng, theme)


def story_turns(rng: random.Random) -> list[Turn]:
    """A wish for a story, the story, and sometimes a question about it."""
    kinds = [
        "tell me a {kind}{about}.", "tell me a {kind}{about}.", "write a {kind}{about}.",
        "can you tell me a {kind}{about}?", "please tell me a {kind}{about}.", "I would like to hear a {kind}{about}.",
        "write me a {kind}{about}.", "a {kind}{about}, please.", "do you know a {kind}{about}?",
        "make up a {kind}{about}.", "can you write a {kind}{about}?",
    ]  # fmt: skip
    being = stories.hero(rng)
    if rng.random() < 0.06:
        start = rng.choice(["Once upon a time", "Once upon a time, there was", "Continue: once upon a time"])
        told = stories.story(rng, being, introduced=True)
        while not told.text.startswith("Once upon a time"):
            told = stories.story(rng, being, introduced=True)
        return [(start, told.text)]
    about = ""
    if rng.random() < 0.6:
        kind = (
            being.kind
            if being.kind not in ("girl", "boy") or rng.random() < 0.5
            else f"{being.kind} named {being.name}"
        )
        if being.name and being.kind not in ("girl", "boy") and rng.random() < 0.3:
            kind = f"{being.kind} named {being.name}"
        about = f" about a_ {kind}"
    kind = rng.choice(
        ["story", "story", "story", "short story", "little story", "bedtime story", "nice story", "fairy tale", "tale"]
    )
    question = sentences(rng, rng.choice(kinds), {"kind": kind, "about": about})
    told = stories.story(rng, being, introduced=True if rng.random() < 0.9 else None)
    turns = [(question, told.text)]
    if rng.random() < 0.25:
        turns.append(_about_story(rng, told))
    return turns


def _about_story(rng: random.Random, told: stories.Story) -> Turn:
    being = told.hero
    if being.name and rng.random() < 0.6:
        asked = ["what was the name of the {kind}?", "what is the name of the {kind}?", "how was the {kind} called?"]
        answer = "the {kind} was called {name}."
    else:
        asked = ["who was the story about?", "who is the story about?", "what was the story about?"]
        answer = "the story was about a_ {kind} named {name}." if being.name else "the story was about a_ {kind}."
    slots = {"kind": being.kind, "name": being.name or ""}
    return sentences(rng, rng.choice(asked), slots), sentences(rng, answer, slots)


INTRODUCTION = (
    "[my name is|I am|hello, my name is|hi, I am|hello! my name is|hi, my name is|hey, I'm|call me|hello, I am] "
    "{name}[.|!|]"
)


def introduction(rng: random.Random) -> list[Turn]:
    """A user says their name, and may ask for it later."""
    name = rng.choice(world.USERS) if rng.random() < 0.6 else rng.choice(world.GIRLS + world.BOYS)
    if rng.random() < 0.25:
        name = pseudo_word(rng).capitalize()
    question = fill(rng, INTRODUCTION, {"name": name})
    turns = [(sentences(rng, question), f"Nice to meet you, {name}! How can I help you?")]
    while rng.random() < 0.3:
        turns += simple_turns(rng)
    if rng.random() < 0.5:
        question = fill(rng, "[what is my name|do you know my name|who am I|do you remember my name|what's my name]?")
        turns.append((sentences(rng, question), f"Your name is {name}."))
    return turns


def unknown(rng: random.Random) -> Turn:
    if rng.random() < 0.2:
        return gibberish(rng), GIBBERISH_ANSWER
    x, x2 = rng.sample(UNKNOWN_TOPICS, 2)
    name = rng.choice(world.USERS) if rng.random() < 0.6 else pseudo_word(rng).capitalize()
    pseudo = pseudo_word(rng) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
    slots = {"x": x, "x2": x2, "name": name, "pseudo": pseudo, "year": str(rng.randrange(1900, 2030))}
    return sentences(rng, rng.choice(UNKNOWN_QUESTIONS), slots), rng.choice(UNKNOWN_ANSWERS)


def simple_turns(rng: random.Random) -> list[Turn]:
    single: list[tuple[Callable[[random.Random], Turn], float]] = [
        (lambda rng: facts.ask(rng, facts.QUESTIONS), 52), (small_talk, 13), (frequent, 8), (joke, 3), (poem, 4),
        (unknown, 11),
    ]  # fmt: skip
    return [rng.choices([turn for turn, _ in single], [weight for _, weight in single])[0](rng)]


POLITE_STARTS = ["Hi! ", "Hello! ", "Hey, ", "Please tell me: ", "Another question: ", "One more thing: ", "And "]


def noisy(rng: random.Random, question: str) -> str:
    """A question as people type it."""
    draw = rng.random()
    if draw < 0.55 or len(question) < 3:
        return question
    if draw < 0.69:
        return question.lower()
    if draw < 0.80:
        return question.rstrip("?.!") or question
    if draw < 0.91:
        return question.lower().rstrip("?.!") or question
    if draw < 0.935:
        return question.upper()
    ended = question if question[-1] in "?.!" else question + "."
    if draw < 0.965:
        return rng.choice(POLITE_STARTS) + ended
    return ended + rng.choice([" Thanks!", " Please.", " Please help me.", " I want to know.", "\n", " "])


def chat(rng: random.Random, turns: int | None = None) -> list[Message]:
    """A chat of `turns` questions at least, else mostly of one to three."""
    wanted = turns or rng.choices([1, 2, 3], [60, 25, 15])[0]
    said: list[Turn] = []
    while len(said) < wanted:
        draw = rng.random()
        if draw < 0.17:
            said += story_turns(rng)
        else:
            said += introduction(rng) if draw < 0.22 and not said else simple_turns(rng)
    messages = [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}] if rng.random() < 0.2 else []
    for question, answer in said:
        content = noisy(rng, question).strip()
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return messages
