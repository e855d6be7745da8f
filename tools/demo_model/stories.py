"""Short stories: a hero, a wish, an obstacle, help, and how it ends."""

import random
from dataclasses import dataclass

from tools.demo_model import world
from tools.demo_model.grammar import fill, pseudo_word, sentences, variants

HE = {"he": "he", "him": "him", "his": "his"}
SHE = {"he": "she", "him": "her", "his": "her"}
# How often a hero has a name or a kind of which there are many, so that the model learns to repeat its input.
RARE = 0.12


@dataclass(frozen=True)
class Being:
    """Somebody in a story.

    Attributes:
        kind: "girl", "boy", "fox", "robot" and so on.
        name: None for "the fox", who has no name.
        intro: how a story brings them in: "a little fox named Rusty".
        full: how a story calls them that begins without an introduction: "Mia", "the little fox".
        short: how the rest of the story calls them: "Rusty", "the fox".
        pronouns: HE or SHE.
    """

    kind: str
    name: str | None
    intro: str
    full: str
    short: str
    pronouns: dict[str, str]

    def slots(self, prefix: str) -> dict[str, str]:
        """{prefix}: short, {prefix}_full, and pronouns: {he} for the hero, {friend_he} for the friend."""
        start = "" if prefix == "hero" else prefix + "_"
        pronouns = {start + word: value for word, value in self.pronouns.items()}
        upper = {(start + word).capitalize(): value.capitalize() for word, value in self.pronouns.items()}
        named = {prefix: self.short, prefix + "_full": self.full, prefix + "_intro": self.intro}
        named[prefix.capitalize()] = self.short[0].upper() + self.short[1:]
        return named | pronouns | upper


def child(rng: random.Random, avoid: str | None = None) -> Being:
    girl = rng.random() < 0.5
    names = world.GIRLS if girl else world.BOYS
    if rng.random() < RARE:
        names = world.RARE_GIRLS if girl else world.RARE_BOYS
    name = rng.choice([name for name in names if name != avoid])
    kind = "girl" if girl else "boy"
    adjective = rng.choice(["", "little ", "young ", "kind ", "clever ", "brave "])
    return Being(kind, name, f"a_ {adjective}{kind} [named|called] {name}", name, name, SHE if girl else HE)


def creature(rng: random.Random, kind: str, named: bool | None = None) -> Being:
    girl = kind in ("princess", "queen", "mermaid", "witch", "fairy", "hen", "cow") or (
        kind not in ("prince", "king", "wizard", "pirate", "giant") and rng.random() < 0.5
    )
    pronouns = SHE if girl else HE
    adjective = rng.choice(world.HERO_ADJECTIVES)
    if named if named is not None else rng.random() < 0.55:
        name = rng.choice(world.ANIMAL_GIRLS if girl else world.ANIMAL_BOYS)
        intro = f"a_ {adjective} {kind} [named|called] {name}"
        return Being(kind, name, intro, f"{name} the {kind}", name, pronouns)
    return Being(kind, None, f"a_ {adjective} {kind}", f"the {adjective} {kind}", f"the {kind}", pronouns)


def hero(rng: random.Random) -> Being:
    if rng.random() < 0.3:
        return child(rng)
    kinds = rng.choices(
        [world.HEROES, world.PEOPLE, world.RARE_HEROES, [pseudo_word(rng)]], [0.68, 0.2, RARE * 0.7, RARE * 0.3]
    )[0]
    return creature(rng, rng.choice(kinds))


def friend_of(rng: random.Random, being: Being) -> Being:
    """Somebody who isn't the hero, isn't of the hero's kind and doesn't have the hero's name."""
    if rng.random() < 0.3:
        return child(rng, being.name)
    kind = rng.choice([kind for kind in world.HEROES if kind != being.kind])
    return creature(rng, kind, named=False)


OPENINGS = [
    "once upon a time, there was {hero_intro}.",
    "once upon a time, there was {hero_intro} who lived {home}.",
    "once upon a time, {hero_intro} lived {home}.",
    "once there was {hero_intro} who lived {home}.",
    "there once was {hero_intro}.",
    "there was once {hero_intro} who lived {home}.",
    "long ago, {hero_intro} lived {home}.",
    "{hero_intro} lived {home}.",
    "{home} lived {hero_intro}.",
    "this is a story about {hero_intro}.",
    "long, long ago, there was {hero_intro} who lived {home}.",
]
FULL_OPENINGS = [
    "{hero_full} lived {home}.",
    "{hero_full} was very [happy|curious|kind|brave|clever].",
    "{hero_full} had a [warm smile|good heart|big dream|loud laugh].",
    "{hero_full} loved to [play outside|sing|look at the clouds|tell jokes|draw pictures|ask questions].",
]

# Each plot: the slots of its own, and its sentences. The first sentence calls the hero {who}.
PLOTS: dict[str, list[str]] = {
    "lost": [
        "{when}, {who} lost {his} {lost}.|{when}, {who} could not find {his} {lost}.|{who} lost {his} {lost} {when}.",
        "{he} looked [everywhere|in the house|in the garden|for a long time], but it was not there.|{he} looked "
        "{place2}, but it was not there.",
        "{hero} was sad and [sat down|began to cry|did not know what to do]. Then {friend_intro} [came by|came "
        "along] and said, "
        '"[Do not worry|Do not cry|Let me help you|I will help you look]."'
        '|"[Where can it be|What shall I do]?" said {hero}. Then {friend_intro} [came by|came along] to help.',
        "together they looked {place}, and there was the {lost}!|they found the {lost} {place}.",
        "{hero} [was so happy that {he} danced|thanked {friend} with a big smile|gave {friend} a big hug].",
    ],
    "stuck": [
        "{when}, {who} was playing with {his} {flying}.|{who} was playing with {his} {flying} {when}.",
        "[the wind blew hard, and|suddenly] the {flying} [got stuck in a tall tree|flew up into a tall tree|landed "
        "on the roof].",
        "{hero} jumped and jumped, but {he} could not reach it.|{he} tried to [reach it with a stick|climb up], but "
        "it was too high.",
        "{friend_intro} [saw this|heard {him}] and [brought a long ladder|came to help].",
        "soon the {flying} was [safe|back] in {his} hands, and {hero} said, \"Thank you!\"|together they got the "
        "{flying} down, and they played until [dinner|sunset].",
    ],
    "hungry": [
        "{when}, {who} was very hungry.|{who} woke up very hungry {when}.",
        "{he} looked for {food}, but there [was nothing left|were none left|were none to be found].|{he} wanted to "
        "eat some {food}, but the basket was empty.",
        "then {he} met {friend_intro} who had a [big basket|bag full] of {food}.",
        '"[May I have some|Can I have one], please?" asked {hero}. "[Of course|Yes], [let us share|there is enough '
        'for both of us]," '
        "said {friend}.",
        "they [sat in the grass|sat under a tree|sat down] and ate [together|until they were full]. [From that day "
        "on, they were good friends.|It was the best meal of the year.|Sharing made the {food} taste even better.]",
    ],
    "storm": [
        "{when}, {who} went for a long walk.|{who} went for a walk {when}.",
        "[suddenly|soon] [dark clouds covered the sky and it began to rain|a great storm began|the wind blew and the "
        "rain came down].",
        "{hero} [was wet and cold|was afraid of the thunder], and {he} was far from home.",
        '"[Come in|Come inside], [it is warm here|you can stay with me]," called {friend_intro} from a [small '
        'house|dry cave|barn].',
        "they [drank hot tea|told stories|sat by the fire] until the rain stopped. [Then a rainbow appeared in the "
        "sky.|When the sun came out, {hero} went home with a smile.|{Hero} never forgot how kind {friend} was.]",
    ],
    "build": [
        "{when}, {who} wanted to build a_ {build}.|{who} wanted to build a_ {build} out of {stuff}.",
        "{he} worked all day, but the {build} [fell down|was not strong enough|would not stand].|but carrying the "
        "{stuff} alone was too hard for {him}.",
        '"I [will never finish|cannot do it alone]," said {hero}. {friend_intro} heard {him} and came to help.',
        "together they carried the {stuff} and worked until [the evening|sunset|it was done].",
        "at last the {build} was finished. [It was the best {build} in the whole land.|They were very proud of it.|"
        "Everyone came to see it.|{Hero} was very proud and thanked {friend}.]",
    ],
    "skill": [
        "{who} wanted to learn to {skill}.|{when}, {who} wanted to learn to {skill}.",
        "[at first it was very hard|at first {he} was afraid], and {he} [wanted to give up|almost gave up].",
        '"[Try again|Do not give up|Take your time]," said {friend_intro}. "[I will show you how|I can teach you|You '
        'can do it]."',
        "every day, {hero} [practised|tried again] {skill_place}, and {friend} helped {him}.",
        "[after a week|at last|in the end], {hero} could {skill} very well. [{He} was so proud of it!|{Friend} "
        "clapped and cheered.|Now {he} teaches others to {skill}.]",
    ],
    "market": [
        "{when}, {who} went to the market to buy {goods}.|{who} went to the market to buy {goods}.",
        "but [{he} came too late, and all the {goods} had been sold|{he} had lost {his} money|{he} had forgotten "
        "{his} basket].",
        "{hero} was [sad|upset] and wanted to go home. Then {friend_intro} [saw {him} and|came by and] [gave {him} "
        "some {goods}|shared some {goods} with {him}].",
        '"Thank you, you are very kind," said {hero}.',
        "{he} went home and made {dish}. [It was delicious.|{He} gave {friend} a big piece.|Everyone at the table "
        "was happy.]",
    ],
    "forest": [
        "{when}, {who} went [deep into the forest|into the dark forest] to look for [berries|mushrooms|flowers|"
        "nuts].|{who} went into the forest to look for [berries|mushrooms|flowers|nuts].",
        "{he} walked too far, and [soon it was dark|{he} could not find the way home].",
        "{hero} was [afraid|scared] and sat down under a tree. "
        'Then {friend_intro} came along and asked, "Are you lost?"',
        '"Yes," said {hero}. "I want to go home." {Friend} [showed {him} the way|walked home with {him}|knew the way].',
        "[soon|before long], {hero} was safe at home. [{He} never walked so far alone again.|{He} thanked {friend} "
        "and went to bed.|From that day on, they were the best of friends.]",
    ],
    "gift": [
        "it was the birthday of {friend_intro}, and {who} wanted to give {friend_him} a present.",
        "but {hero} had no money, and {he} [did not know what to do|was sad about it].",
        "{he} thought and thought. then {he} had an idea and made {gift}.",
        '"[What a lovely present|This is the best gift of all]!" said {friend}. "[You made it yourself|Thank you so '
        'much]!"',
        "they [ate cake and danced|sang and laughed] [all evening|until late at night|until the moon came up].",
    ],
    "garden": [
        "{when}, {who} planted a tiny seed in the garden.|{who} planted a tiny seed in the garden.",
        "{he} waited and waited, but nothing [grew|happened]. [The ground was too dry.|There was no rain for days.]",
        '"A seed needs water and time," said {friend_intro}.',
        "so {hero} [watered the seed|carried water] every day, and {friend} helped {him}.",
        "at last a_ {plant} grew, {plant_looks}. [{Hero} smiled with joy.|It was the pride of the garden.|They "
        "danced around it.]",
    ],
    "noise": [
        "one night, {who} heard a strange noise.|late at night, {who} heard a strange noise {place}.",
        "{he} was [afraid|scared] and hid under the blanket. but the noise did not stop.",
        "then {he} took a lamp and went to look. it was only a_ [little|small] {visitor}!",
        "the {visitor} was [cold|hungry|lost], so {hero} gave it [some milk|a warm blanket|something to eat].",
        "[now they are good friends|from that night on, {hero} was not afraid of the dark|{hero} laughed and went "
        "back to bed].",
    ],
    "quarrel": [
        "{when}, {who} and {friend_intro} found a_ {toy}.|{who} and {friend_intro} found a_ {toy} {place}.",
        '"It is mine!" said {hero}. "No, I saw it first!" said {friend}.',
        "they [pulled and pulled|quarrelled all day], and the {toy} almost broke.",
        'then a wise old [owl|woman|man] said, "[Why do you not take turns|Why do you not share it]?"',
        "so they [took turns|shared it] and had [twice the fun|a lovely afternoon|a wonderful day].",
    ],
    "race": [
        "{when}, there was a big race, and {who} wanted to win it.|{who} wanted to win the big race.",
        "{hero} ran [very fast|as fast as the wind] and was soon in front.",
        "then {he} saw that {friend_intro} had fallen and [was hurt|could not get up].",
        "{hero} stopped and helped {friend_him} [up|to stand]. they walked to the end together.",
        "{hero} did not win the race, but [everyone cheered for {him}|{he} won a new friend|{he} was the real winner "
        "that day].",
    ],
    "treasure": [
        "{when}, {who} found an old map {place}.|{who} found an old map {place}.",
        "it showed the way to a treasure [on a far island|behind the hills|across the river].",
        "but a [wide river|deep valley] was in the way, and {hero} could not cross it. {friend_intro} knew where "
        "there was [an old bridge|a safe path].",
        "they walked [all day|for hours], and at last they found {treasure}!",
        "they shared it with [all their friends|the whole village|everyone they knew].",
    ],
    "ill": [
        "{when}, {who} heard that {friend_intro} was ill.|{who} heard that {friend_intro} was ill.",
        "[{he} wanted to help, but {he} did not know how|at first {he} did not know what to do].",
        "then {he} cooked some [hot soup|sweet tea|warm milk] and took it to {friend}.",
        "{he} sat by the bed and [told {friend_him} a story|sang a quiet song|read from a book].",
        "[the next day|after two days], {friend} felt much better. [\"You are a true friend,\" {friend_he} said.|"
        "They went out to play.]",
    ],
    "work": [
        "{when}, {who} had to {chore}, but {he} wanted to play.|{who} had to {chore}, but {he} wanted to play.",
        "it was a lot of work, and {he} was [soon tired|too small to do it alone].",
        "{friend_intro} came by and asked, \"[May I help you|Do you need help|Can I help you]?\"",
        "they sang a [funny|happy] song while they worked, and soon [it was done|the work was done].",
        "then they [played|ran to the river|climbed the hill] together until [dinner|sunset|the stars came out].",
    ],
    "star": [
        "one night, {who} wished to touch a star.|every night, {who} looked at the stars and wished to touch one.",
        "{he} climbed the [highest hill|tallest tree], but the stars were still too far away.",
        '"I will never touch a star," {he} said. "Look down," said {friend_intro}.',
        "there in the [lake|river|pond], a hundred stars were shining on the water.",
        "{hero} put {his} hand into the water and [laughed|smiled]. [{He} had touched a star at last.|{His} wish had "
        "come true.]",
    ],
    "winter": [
        "it was a cold winter, and {who} had no [warm coat|wood for the fire|food left].",
        "the snow was deep, and {he} [could not go out|was cold all day and all night].",
        "{friend_intro} saw this and said, \"[Come and live with me|You can stay with me] until spring.\"",
        "they sat by the fire, [ate soup|drank tea] and told stories.",
        "when spring came, [{hero} thanked {friend}|they planted flowers together|they were the best of friends].",
    ],
}  # fmt: skip
ENDINGS = [
    "the end.",
    "from that day on, they were the best of friends.",
    "and they lived happily ever after.",
    "it was a day to remember.",
    "that night, {hero} slept very well.",
    "and {hero} learned that [it is good to have friends|a little help goes a long way|kind words are worth more "
    "than gold].",
    "{hero} never forgot that day.",
]


@dataclass(frozen=True)
class Story:
    text: str
    hero: Being
    plot: str


def _plot_slots(rng: random.Random) -> dict[str, str]:
    goods = rng.choice(list(world.DISHES))
    skill, build, plant = (rng.choice(list(table)) for table in (world.SKILLS, world.BUILDS, world.PLANTS))
    place, place2 = rng.sample(world.HIDING_PLACES, 2)
    return {
        "when": fill(rng, rng.choice(world.DAY_TIMES)), "lost": rng.choice(world.LOST_THINGS), "place": place,
        "place2": place2, "flying": rng.choice(["kite", "ball", "balloon", "paper plane", "hat"]),
        "food": rng.choice(world.FRUITS), "build": build, "stuff": world.BUILDS[build], "skill": skill,
        "skill_place": world.SKILLS[skill], "goods": goods, "dish": world.DISHES[goods],
        "gift": rng.choice(world.GIFTS), "plant": plant, "plant_looks": world.PLANTS[plant],
        "visitor": rng.choice(world.NIGHT_ANIMALS), "toy": rng.choice(world.TOYS),
        "treasure": rng.choice(world.TREASURES), "chore": rng.choice(world.CHORES), "home": rng.choice(world.HOMES),
    }  # fmt: skip


def story(
    rng: random.Random, being: Being | None = None, plot: str | None = None, introduced: bool | None = None
) -> Story:
    """A story of 4 to 8 short sentences; `introduced` says whether it begins with who the hero is."""
    being = being or hero(rng)
    plot = plot or rng.choice(list(PLOTS))
    friend = friend_of(rng, being)
    slots = _plot_slots(rng) | being.slots("hero") | friend.slots("friend")
    parts = []
    if introduced or (introduced is None and rng.random() < 0.7):
        parts.append(rng.choice(OPENINGS))
        slots["who"] = rng.choice([being.short, being.pronouns["he"]])
    elif rng.random() < 0.3:
        parts.append(rng.choice(FULL_OPENINGS))
        slots["who"] = rng.choice([being.short, being.pronouns["he"]])
    else:
        slots["who"] = being.full
    if parts and rng.random() < 0.35:
        parts.append(rng.choice(world.HERO_TRAITS))
    parts += [rng.choice(variants(sentence)) for sentence in PLOTS[plot]]
    text = " ".join(_sentence(rng, part, slots) for part in parts)
    if rng.random() < 0.35:
        ending = _sentence(rng, rng.choice(ENDINGS), slots)
        text = text if ending in text else f"{text} {ending}"
    return Story(text, being, plot)


def _sentence(rng: random.Random, template: str, slots: dict[str, str]) -> str:
    text = sentences(rng, template, slots)
    return text if text.endswith((".", "!", "?", '"')) else text + "."
